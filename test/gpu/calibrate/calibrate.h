/* What the parts of calibrate share. Each item measures one property of a GPU and its driver that
 * the law of shares and the simulated GPU rest on (docs/test-gpu.md). Whatever uses CUDA runs in a process of its
 * own, forked before; results are left in memory that all share. */
#ifndef CALIBRATE_H
#define CALIBRATE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "../../../gpuload/driver.h"

#define US 1000ll
#define MS 1000000ll

struct config {
	const char *libcuda, *libnvml;
	int gpu;
	double scale; /* of how long things are measured: 1, or less for a quick look */
};
extern const struct config *config;

/* --- process.c ------------------------------------------------------------------------------- */

#define MAX_PROCESSES 4
#define MAX_VALUES 4096

/* What the processes of one measurement share. */
struct together {
	atomic_uint ready, stop;
	uint32_t futex; /* handover.c */
	int64_t at;
	double value[MAX_VALUES];
	unsigned n; /* of value */
	double more[MAX_PROCESSES];
	char text[16][64];
};

typedef void role(struct together *t, unsigned number);
/* Runs `first` in one process and `others` in n - 1 more, each with the driver open; they begin
 * together, and when the first ends the others are to stop. False: one failed, and said so. */
bool run_together(struct together *t, unsigned n, role *first, role *others);
/* Keeps the GPU busy with kernels of 1 ms until it is to stop. */
void saturate(struct together *t, unsigned number);
struct together *together_new(void);

/* --- kernels.c ------------------------------------------------------------------------------- */

const char *kernels_text(void);
/* Of the calling process. */
CUfunction kernel_spin(void), kernel_stamp(void);
CUstream stream_new(void);
CUevent event_new(bool timing);
void spin(CUstream s, uint64_t ns);
/* How long it takes from now until the event has happened, by looking at it all the time. */
void poll_event(CUevent e);
double elapsed_us(CUevent a, CUevent b);
/* Whether the GPU runs the code of kernels (the simulated one does not). */
bool kernels_run(void);

/* --- stats.c --------------------------------------------------------------------------------- */

/* Sorts. */
double quantile(double *v, unsigned n, double q);
double mean(const double *v, unsigned n);

/* --- json.c: what is printed ----------------------------------------------------------------- */

void json_open(const char *name, char bracket); /* '{' or '[' */
void json_close(char bracket);
void json_number(const char *name, double v); /* null when it is not finite */
void json_text(const char *name, const char *v);
void json_bool(const char *name, bool v);

/* --- the items -------------------------------------------------------------------------------- */

/* What the simulator's spec takes from them; NAN: not measured. */
struct spec {
	double slice_us, switch_us, launch_ns, sync_ns, queue_depth;
};

void item_loss(void);			/* slices.c */
void item_slices(struct spec *s);	/* slices.c */
void item_inflation(void);		/* inflation.c */
void item_cost(struct spec *s);		/* cost.c */
void item_handover(void);		/* handover.c */
void item_preemption(void);		/* preemption.c */
void item_capture(void);		/* capture.c */
void item_nvml(void);			/* nvml.c */
#endif
