/* The program's entry on x86-64. The C runtime's own start file asks for __libc_start_main of
 * glibc 2.34; this one asks for the version that every glibc has. */
#ifdef __x86_64__
#include <features.h>
#include "compat.h"

int main(int argc, char **argv);

__asm__(".text\n"
	".globl _start\n"
	".type _start,@function\n"
	"_start:\n"
	"	xor %ebp, %ebp\n"
	"	mov %rdx, %r9\n" /* the loader's exit function */
	"	pop %rsi\n"	 /* argc */
	"	mov %rsp, %rdx\n" /* argv */
	"	and $-16, %rsp\n"
	"	push %rax\n"
	"	push %rsp\n"
	"	xor %r8d, %r8d\n" /* no fini: the program has no destructors */
	"	xor %ecx, %ecx\n" /* no init: the program has no constructors */
	"	mov $main, %edi\n"
	"	call *__libc_start_main@GOTPCREL(%rip)\n"
	"	hlt\n"
	".size _start, . - _start\n");
#endif
