/* The kernels, as PTX that every GPU since Maxwell takes. */
#ifndef GPULOAD_PTX_H
#define GPULOAD_PTX_H

/* A spinning kernel looks at the GPU's global timer all the time. Two looks further apart than this
 * (ns) had another program's turn between them: such a gap is no time that the kernel ran. The
 * timer of some GPUs moves in steps of 1 us, the shortest turn with its two changes of context is
 * well above 16 us. */
#define PTX_GAP_NS "16384"

/* Recorded in device memory by tranche_probe, for all processes on the GPU on one time scale: the
 * global timer is the GPU's. Words of 64 bits. */
enum {
	PROBE_KERNELS, /* ended */
	PROBE_RUN_NS,  /* time that they ran, gaps left out */
	PROBE_GAPS,
	PROBE_GAP_NS,
	PROBE_LAST_NS,	      /* when the last one ended */
	PROBE_BUCKETS = 16,   /* time that they ran in each bucket, from here on */
	PROBE_BUCKET_BITS = 26, /* a bucket is 2^26 ns: 67 ms */
	PROBE_BUCKET_COUNT = 4096, /* 275 s, then from the start */
	PROBE_WORDS = PROBE_BUCKETS + PROBE_BUCKET_COUNT,
};

/* Recorded by tranche_stamp: what happened to one kernel. */
enum {
	STAMP_START_NS,
	STAMP_END_NS,
	STAMP_RUN_NS,
	STAMP_GAPS, /* all of them, also where there was no room */
	STAMP_GAP,  /* pairs: last look before the gap, first look after it */
};

/* All run until they had the GPU for `ns`, each block by itself, and end in any case after 1 s and
 * 256 times that.
 *   tranche_spin(u64 ns)
 *   tranche_probe(u64 ns, u64 words)           and keeps count there (thread 0 of block 0)
 *   tranche_stamp(u64 ns, u64 words, u64 room) and notes its gaps, for at most `room` of them;
 *                                              one block of one thread
 *   tranche_spin_flag(u32 *p)                  until *p is not zero */
#define PTX_SPIN_REGS                                                                              \
	"	.reg .u64 %ns, %last, %now, %d, %ran, %end;\n"                                     \
	"	.reg .pred %gap, %more, %late;\n"
/* %ran, %last, %end from %ns */
#define PTX_SPIN_START                                                                             \
	"	mov.u64 %ran, 0;\n"                                                                \
	"	mov.u64 %last, %globaltimer;\n"                                                    \
	"	shl.b64 %end, %ns, 8;\n"                                                           \
	"	add.u64 %end, %end, %last;\n"                                                      \
	"	add.u64 %end, %end, 1000000000;\n"
/* One look: %now, %d since the last, and whether that was a gap. */
#define PTX_SPIN_LOOK                                                                              \
	"	mov.u64 %now, %globaltimer;\n"                                                     \
	"	sub.u64 %d, %now, %last;\n"                                                        \
	"	setp.ge.u64 %gap, %d, " PTX_GAP_NS ";\n"
/* Whether there is more to do. */
#define PTX_SPIN_MORE                                                                              \
	"	mov.u64 %last, %now;\n"                                                            \
	"	setp.lt.u64 %more, %ran, %ns;\n"                                                   \
	"	setp.lt.u64 %late, %now, %end;\n"                                                  \
	"	and.pred %more, %more, %late;\n"

static const char spin_ptx[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"

	".visible .entry tranche_spin(.param .u64 ns)\n"
	"{\n"
	PTX_SPIN_REGS
	"	ld.param.u64 %ns, [ns];\n"
	PTX_SPIN_START
	"SPIN:\n"
	PTX_SPIN_LOOK
	"	@!%gap add.u64 %ran, %ran, %d;\n"
	PTX_SPIN_MORE
	"	@%more bra SPIN;\n"
	"	ret;\n"
	"}\n"

	".visible .entry tranche_probe(.param .u64 ns, .param .u64 words)\n"
	"{\n"
	PTX_SPIN_REGS
	"	.reg .u64 %words, %told, %part, %bucket, %b, %at;\n"
	"	.reg .u32 %x, %y;\n"
	"	.reg .pred %teller, %note;\n"
	"	ld.param.u64 %ns, [ns];\n"
	"	ld.param.u64 %words, [words];\n"
	"	cvta.to.global.u64 %words, %words;\n"
	"	mov.u32 %x, %tid.x;\n"
	"	mov.u32 %y, %ctaid.x;\n"
	"	or.b32 %x, %x, %y;\n"
	"	setp.eq.u32 %teller, %x, 0;\n"
	"	mov.u64 %told, 0;\n"
	PTX_SPIN_START
	"	shr.u64 %bucket, %last, 26;\n"
	"LOOK:\n"
	PTX_SPIN_LOOK
	"	@!%gap add.u64 %ran, %ran, %d;\n"
	"	and.pred %note, %gap, %teller;\n"
	"	@%note red.global.add.u64 [%words+16], 1;\n"
	"	@%note red.global.add.u64 [%words+24], %d;\n"
	PTX_SPIN_MORE
	"	shr.u64 %b, %now, 26;\n"
	"	setp.ne.u64 %note, %b, %bucket;\n"
	"	@%note bra TELL;\n"
	"	@%more bra LOOK;\n"
	"TELL:\n"
	"	sub.u64 %part, %ran, %told;\n"
	"	mov.u64 %told, %ran;\n"
	"	and.b64 %at, %bucket, 4095;\n"
	"	shl.b64 %at, %at, 3;\n"
	"	add.u64 %at, %at, %words;\n"
	"	mov.u64 %bucket, %b;\n"
	"	@%teller red.global.add.u64 [%at+128], %part;\n"
	"	@%more bra LOOK;\n"
	"	@%teller red.global.add.u64 [%words], 1;\n"
	"	@%teller red.global.add.u64 [%words+8], %ran;\n"
	"	@%teller red.global.max.u64 [%words+32], %now;\n"
	"	ret;\n"
	"}\n"

	".visible .entry tranche_stamp(.param .u64 ns, .param .u64 words, .param .u64 room)\n"
	"{\n"
	PTX_SPIN_REGS
	"	.reg .u64 %words, %room, %gaps, %at;\n"
	"	.reg .pred %fits;\n"
	"	ld.param.u64 %ns, [ns];\n"
	"	ld.param.u64 %words, [words];\n"
	"	ld.param.u64 %room, [room];\n"
	"	cvta.to.global.u64 %words, %words;\n"
	"	add.u64 %at, %words, 32;\n"
	"	mov.u64 %gaps, 0;\n"
	PTX_SPIN_START
	"	st.global.u64 [%words], %last;\n"
	"STAMP:\n"
	PTX_SPIN_LOOK
	"	@!%gap add.u64 %ran, %ran, %d;\n"
	"	setp.lt.u64 %fits, %gaps, %room;\n"
	"	and.pred %fits, %fits, %gap;\n"
	"	@%fits st.global.u64 [%at], %last;\n"
	"	@%fits st.global.u64 [%at+8], %now;\n"
	"	@%fits add.u64 %at, %at, 16;\n"
	"	@%gap add.u64 %gaps, %gaps, 1;\n"
	PTX_SPIN_MORE
	"	@%more bra STAMP;\n"
	"	st.global.u64 [%words+8], %now;\n"
	"	st.global.u64 [%words+16], %ran;\n"
	"	st.global.u64 [%words+24], %gaps;\n"
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
