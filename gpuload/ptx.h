/* The kernels, as PTX that every GPU since Maxwell takes. */
#ifndef GPULOAD_PTX_H
#define GPULOAD_PTX_H

/* tranche_spin(u64 ns): each block runs for `ns` of the GPU's global timer.
 * tranche_spin_flag(u32 *p): runs until *p is not zero. */
static const char spin_ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry tranche_spin(.param .u64 ns)\n"
	"{\n"
	"	.reg .u64 %rd<4>;\n"
	"	.reg .pred %p<2>;\n"
	"	ld.param.u64 %rd1, [ns];\n"
	"	mov.u64 %rd2, %globaltimer;\n"
	"SPIN:\n"
	"	mov.u64 %rd3, %globaltimer;\n"
	"	sub.u64 %rd3, %rd3, %rd2;\n"
	"	setp.lt.u64 %p1, %rd3, %rd1;\n"
	"	@%p1 bra SPIN;\n"
	"	ret;\n"
	"}\n"
	".visible .entry tranche_spin_flag(.param .u64 flag)\n"
	"{\n"
	"	.reg .u64 %rd<3>;\n"
	"	.reg .u32 %r<2>;\n"
	"	.reg .pred %p<2>;\n"
	"	ld.param.u64 %rd1, [flag];\n"
	"	cvta.to.global.u64 %rd2, %rd1;\n"
	"WAIT:\n"
	"	ld.volatile.global.u32 %r1, [%rd2];\n"
	"	setp.eq.u32 %p1, %r1, 0;\n"
	"	@%p1 bra WAIT;\n"
	"	ret;\n"
	"}\n";
#endif
