/* A server under an open-loop load: requests are due whether or not earlier ones are done. One
 * thread launches them, another waits for each in turn. */
#include <stdlib.h>
#include "worker.h"

#define QUEUE 1024 /* requests under way; more wait to be launched, and their time counts */
#define SAMPLES (1u << 20)

static struct {
	pthread_mutex_t lock;
	pthread_cond_t changed;
	CUevent done[QUEUE];
	int64_t due[QUEUE];
	unsigned launched, finished;
	bool closed;
} queue = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static struct sample {
	int64_t due;
	int64_t took;
} *sample;
static unsigned samples;

/* The next request to wait for; false: there will be none. */
static bool next_launched(unsigned *i)
{
	bool any;

	pthread_mutex_lock(&queue.lock);
	while (queue.finished == queue.launched && !queue.closed)
		pthread_cond_wait(&queue.changed, &queue.lock);
	any = queue.finished != queue.launched;
	*i = queue.finished % QUEUE;
	pthread_mutex_unlock(&queue.lock);
	return any;
}

static void *finish(void *arg)
{
	struct worker *w = arg;
	unsigned i;

	driver_attach();
	while (next_launched(&i)) {
		MUST(cuEventSynchronize(queue.done[i]));
		if (samples < SAMPLES)
			sample[samples++] = (struct sample){queue.due[i], now_ns() - queue.due[i]};
		atomic_fetch_add_explicit(&w->completed, w->o->graph ? w->o->graph : 1,
					  memory_order_relaxed);
		pthread_mutex_lock(&queue.lock);
		queue.finished++;
		pthread_cond_signal(&queue.changed);
		pthread_mutex_unlock(&queue.lock);
	}
	return NULL;
}

static void submit(struct worker *w, int64_t due)
{
	unsigned i = queue.launched % QUEUE;

	pthread_mutex_lock(&queue.lock);
	while (queue.launched - queue.finished == QUEUE)
		pthread_cond_wait(&queue.changed, &queue.lock);
	pthread_mutex_unlock(&queue.lock);
	worker_launch(w, w->lane[0].stream);
	MUST(cuEventRecord(queue.done[i], w->lane[0].stream));
	queue.due[i] = due;
	pthread_mutex_lock(&queue.lock);
	queue.launched++;
	pthread_cond_signal(&queue.changed);
	pthread_mutex_unlock(&queue.lock);
}

void *latency_run(void *arg)
{
	struct worker *w = arg;
	pthread_t waiter;

	driver_attach();
	sample = malloc(SAMPLES * sizeof *sample);
	if (!sample)
		die("out of memory");
	for (unsigned i = 0; i < QUEUE; i++)
		MUST(cuEventCreate(&queue.done[i], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
	if (pthread_create(&waiter, NULL, finish, w))
		die("no second thread");
	pace_start(&w->pace, w->o, w->number);
	while (!atomic_load_explicit(&load_stopping, memory_order_relaxed))
		submit(w, pace_next(&w->pace));
	pthread_mutex_lock(&queue.lock);
	queue.closed = true;
	pthread_cond_signal(&queue.changed);
	pthread_mutex_unlock(&queue.lock);
	pthread_join(waiter, NULL);
	return NULL;
}

static int by_time(const void *a, const void *b)
{
	const struct sample *x = a, *y = b;

	return (x->took > y->took) - (x->took < y->took);
}

static double at(unsigned first, double quantile)
{
	unsigned n = samples - first, i = (unsigned)(quantile * n);

	return (double)sample[first + (i < n ? i : n - 1)].took / 1e6;
}

void latency_result(int64_t from_ns, struct latency *out)
{
	unsigned first = 0;

	while (first < samples && sample[first].due < from_ns)
		first++;
	out->requests = samples - first;
	if (!out->requests)
		return;
	qsort(sample + first, out->requests, sizeof *sample, by_time);
	out->p50_ms = at(first, 0.5);
	out->p90_ms = at(first, 0.9);
	out->p99_ms = at(first, 0.99);
	out->max_ms = at(first, 1);
}
