/* What a kernel is worth: how long it runs alone on the GPU and how much of it it fills.
 *
 *   tranche_spin(u64 ns)       exactly ns; so do tranche_probe and tranche_stamp, whose further
 *                              parameters say where to record it, which is not done
 *   tranche_spin_flag(u32 *p)  until *p is not zero
 *   any other                  kernel_wave_ns for each wave of kernel_wave_blocks to a multiprocessor;
 *                              less for a part of the first wave, but kernel_min_ns at least
 *                              (keys of the machine's spec) */
#include <stdlib.h>
#include <string.h>
#include "work.h"

/* What the name of a function says; kept in CUfunc_st.time. */
static const char plain_kernel = 'k', spin_kernel = 's', flag_kernel = 'f';

static const void *kind_by_name(const char *name)
{
	static const struct {
		const char *name, *kind;
	} known[] = { { "tranche_spin", &spin_kernel }, { "tranche_probe", &spin_kernel },
		      { "tranche_stamp", &spin_kernel }, { "tranche_spin_flag", &flag_kernel } };
	for (size_t i = 0; name && i < sizeof known / sizeof *known; i++)
		if (!strcmp(name, known[i].name))
			return known[i].kind;
	return &plain_kernel;
}

static const void *kind_of(struct CUfunc_st *f)
{
	const void *k = __atomic_load_n(&f->time, __ATOMIC_RELAXED);
	if (k)
		return k;
	k = kind_by_name(f->name);
	__atomic_store_n(&f->time, (void *)(uintptr_t)k, __ATOMIC_RELAXED);
	return k;
}

/* CU_LAUNCH_PARAM_* of cuda.h, as values in the list `extra`. */
enum { PARAM_END = 0, PARAM_BUFFER = 1, PARAM_SIZE = 2 };

static const void *extra_buffer(void **extra, size_t *size)
{
	const void *buffer = NULL;
	*size = 0;
	for (int i = 0; extra && i < 16 && (uintptr_t)extra[i] != PARAM_END; i += 2) {
		if ((uintptr_t)extra[i] == PARAM_BUFFER)
			buffer = extra[i + 1];
		else if ((uintptr_t)extra[i] == PARAM_SIZE && extra[i + 1])
			memcpy(size, extra[i + 1], sizeof *size);
	}
	return buffer;
}

static bool first_param(const struct sim_launch *l, uint64_t *value)
{
	size_t size;
	const void *p = l->params ? l->params[0] : extra_buffer(l->extra, &size);
	if (!p || (!l->params && size < sizeof *value))
		return false;
	memcpy(value, p, sizeof *value);
	return true;
}

static uint32_t occupancy(const struct sim_model *m, uint64_t blocks, uint64_t threads)
{
	uint64_t per_sm = m->max_threads_per_sm / (threads ? threads : 1);
	if (per_sm > m->max_blocks_per_sm)
		per_sm = m->max_blocks_per_sm;
	uint64_t room = (per_sm ? per_sm : 1) * (m->sms ? m->sms : 1);
	if (blocks >= room)
		return SIM_ENGINE_OCC_FULL;
	uint32_t occ = (uint32_t)(blocks * SIM_ENGINE_OCC_FULL / room);
	return occ ? occ : 1;
}

static CUresult check(const struct sim_model *m, const struct sim_launch *l, const struct CUfunc_st *f)
{
	uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2];
	uint64_t shared = (uint64_t)l->shared + (unsigned)(f->shared_static > 0 ? f->shared_static : 0);
	if (!l->grid[0] || !l->grid[1] || !l->grid[2] || !threads || l->grid[0] > 0x7fffffffu ||
	    l->grid[1] > 65535 || l->grid[2] > 65535 || l->block[0] > 1024 || l->block[1] > 1024 ||
	    l->block[2] > 64 || threads > 1024)
		return CUDA_ERROR_INVALID_VALUE;
	if (l->params && l->extra)
		return CUDA_ERROR_INVALID_VALUE;
	if (m->smem_per_block_optin && shared > m->smem_per_block_optin)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
	uint64_t per_sm = m->max_threads_per_sm / threads;
	if (l->cooperative && blocks > (uint64_t)m->sms * (per_sm < m->max_blocks_per_sm ? per_sm : m->max_blocks_per_sm))
		return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
	return CUDA_SUCCESS;
}

CUresult sim_kernel_cost(const struct CUctx_st *ctx, const struct sim_launch *l, struct sim_cost *c)
{
	struct CUfunc_st *f = sim_func_of(l->f);
	const struct sim_model *m = &sim_ctx_gpu(ctx)->model;
	uint64_t value;
	if (!f || f->dead)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult r = check(m, l, f);
	if (r)
		return r;
	uint64_t blocks = (uint64_t)l->grid[0] * l->grid[1] * l->grid[2];
	const void *kind = kind_of(f);
	*c = (struct sim_cost){
		.occ = occupancy(m, blocks, (uint64_t)l->block[0] * l->block[1] * l->block[2])
	};
	if (kind != &plain_kernel && !first_param(l, &value))
		return CUDA_ERROR_INVALID_VALUE;
	if (kind == &flag_kernel) {
		c->spins = true;
		c->flag = value;
	} else if (kind == &spin_kernel) {
		c->dur_ns = value ? value : 1;
	} else {
		uint64_t wave = (uint64_t)m->sms * sim_shared->kernel_wave_blocks;
		uint64_t ns = sim_shared->kernel_wave_ns;
		c->dur_ns = blocks > wave ? (blocks + wave - 1) / wave * ns : blocks * ns / wave;
		if (c->dur_ns < sim_shared->kernel_min_ns)
			c->dur_ns = sim_shared->kernel_min_ns;
	}
	return CUDA_SUCCESS;
}

/* A number that is normal enough: the sum of twelve uniform ones. */
static double normal(void)
{
	static __thread uint64_t state;
	double sum = -6;
	if (!state)
		state = (sim_shared->seed + 1ull) * 0x9e3779b97f4a7c15ull ^
			((uint64_t)(sim_proc_slot() + 1) << 32) ^ (uintptr_t)&state;
	for (int i = 0; i < 12; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		sum += (double)(state >> 11) / 9007199254740992.0;
	}
	return sum;
}

/* e to the x for the x that occur; libm's has a symbol version too new for old systems. */
static double power_of_e(double x)
{
	double sum = 1, term = 1;
	for (int i = 1; i < 40; i++) {
		term *= x / i;
		sum += term;
	}
	return sum;
}

uint64_t sim_kernel_jitter(uint64_t dur_ns)
{
	if (!sim_shared->jitter_permille)
		return dur_ns;
	double sigma = sim_shared->jitter_permille / 1000.0;
	return (uint64_t)((double)dur_ns * power_of_e(sigma * normal() - sigma * sigma / 2)) + 1;
}

CUresult sim_do_kernel(struct CUstream_st *s, const struct sim_cost *c)
{
	struct sim_op_desc d = { .kind = SIM_OP_KERNEL, .occ = c->occ };
	if (!c->spins) {
		d.dur_ns = sim_kernel_jitter(c->dur_ns);
		return sim_enqueue(s, &d, NULL, NULL);
	}
	struct sim_action *a = sim_action_new(SIM_ACT_FLAG, s->ctx);
	if (!a)
		return CUDA_ERROR_OUT_OF_MEMORY;
	d.kind = SIM_OP_SPIN;
	a->addr = c->flag;
	a->time->actions++;
	CUresult r = sim_enqueue(s, &d, NULL, a);
	if (r) {
		a->time->actions--;
		sim_action_free(a);
	}
	return r;
}

/* --- copies of arguments --------------------------------------------------------------------------- */

#define MAX_PARAMS 256

/* Sizes of a kernel's parameters as far as the module says; a known kernel has one of 8 bytes. */
static size_t param_sizes(struct CUfunc_st *f, size_t *size)
{
	size_t n = 0, offset;
	while (n < MAX_PARAMS && cuFuncGetParamInfo((CUfunction)f, n, &offset, &size[n]) == CUDA_SUCCESS)
		n++;
	if (!n && kind_of(f) != &plain_kernel) {
		size[0] = 8;
		n = 1;
	}
	return n;
}

static void copy_params(struct sim_args *a, void **params, const size_t *size, size_t n)
{
	size_t bytes = n * sizeof(void *);
	for (size_t i = 0; i < n; i++)
		bytes += (size[i] + 15) & ~(size_t)15;
	char *p = a->block = malloc(bytes + 16);
	if (!p)
		return;
	a->params = a->block;
	p += (n * sizeof(void *) + 15) & ~(size_t)15;
	for (size_t i = 0; i < n; i++) {
		a->params[i] = p;
		memcpy(p, params[i], size[i]);
		p += (size[i] + 15) & ~(size_t)15;
	}
}

static void copy_extra(struct sim_args *a, void **extra)
{
	size_t size;
	const void *buffer = extra_buffer(extra, &size);
	char *p = a->block = malloc(5 * sizeof(void *) + sizeof size + size);
	if (!p)
		return;
	a->extra = a->block;
	p += 5 * sizeof(void *);
	a->extra[0] = (void *)PARAM_BUFFER;
	a->extra[1] = p + sizeof size;
	a->extra[2] = (void *)PARAM_SIZE;
	a->extra[3] = p;
	a->extra[4] = (void *)PARAM_END;
	memcpy(p, &size, sizeof size);
	if (buffer)
		memcpy(p + sizeof size, buffer, size);
}

void sim_args_copy(struct sim_args *a, const struct sim_launch *l)
{
	size_t size[MAX_PARAMS];
	struct CUfunc_st *f = sim_func_of(l->f);
	*a = (struct sim_args){ .params = l->params, .extra = l->extra };
	size_t n = f && l->params ? param_sizes(f, size) : 0;
	if (n)
		copy_params(a, l->params, size, n);
	else if (l->extra && !l->params)
		copy_extra(a, l->extra);
}

void sim_args_free(struct sim_args *a)
{
	free(a->block);
	*a = (struct sim_args){ 0 };
}
