/* Process start, and the loader's functions, under the version names that every glibc since 2.17
 * has. gcc's crt1.o and a plain reference to dlopen would ask for GLIBC_2.34 on a recent build
 * machine, and the program would not start on an older box.
 *
 * Linked with -nostartfiles. Passing no init and fini function is right for both generations of
 * __libc_start_main as long as the program has no constructors; this one has none. */
#if defined(__x86_64__)
#define BASE "GLIBC_2.2.5"
__asm__(".text\n"
	".globl _start\n"
	".type _start, @function\n"
	"_start:\n"
	"	xorl %ebp, %ebp\n"
	"	movq %rdx, %r9\n" /* rtld_fini */
	"	popq %rsi\n"      /* argc */
	"	movq %rsp, %rdx\n"
	"	andq $-16, %rsp\n"
	"	pushq %rax\n"
	"	pushq %rsp\n"
	"	xorl %r8d, %r8d\n"
	"	xorl %ecx, %ecx\n"
	"	leaq main(%rip), %rdi\n"
	"	call *__libc_start_main@GOTPCREL(%rip)\n"
	"	hlt\n"
	".size _start, . - _start\n");
#elif defined(__aarch64__)
#define BASE "GLIBC_2.17"
__asm__(".text\n"
	".globl _start\n"
	".type _start, %function\n"
	"_start:\n"
	"	mov x29, #0\n"
	"	mov x30, #0\n"
	"	mov x5, x0\n" /* rtld_fini */
	"	ldr x1, [sp]\n"
	"	add x2, sp, #8\n"
	"	mov x6, sp\n"
	"	adrp x0, main\n"
	"	add x0, x0, :lo12:main\n"
	"	mov x3, #0\n"
	"	mov x4, #0\n"
	"	bl __libc_start_main\n"
	"	brk #1000\n"
	".size _start, . - _start\n");
#else
#error "no process start for this architecture"
#endif
__asm__(".symver __libc_start_main, __libc_start_main@" BASE "\n");
