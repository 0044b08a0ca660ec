#include <stdio.h>
#include <string.h>
#include "load.h"

static void sum(const struct load_result *r, unsigned n, struct load_result *out)
{
	for (unsigned i = 0; i < n; i++) {
		if (!r[i].n_intervals)
			continue; /* it failed, and said so */
		out->kernels += r[i].kernels;
		out->share += r[i].share;
		out->share_first_s += r[i].share_first_s;
		out->share_after_2s += r[i].share_after_2s;
		if (r[i].wall_s > out->wall_s)
			out->wall_s = r[i].wall_s;
		if (!out->n_intervals || r[i].n_intervals < out->n_intervals)
			out->n_intervals = r[i].n_intervals;
		probe_add(&out->probe, &r[i].probe);
		if (r[i].latency.requests)
			out->latency = r[i].latency;
		if (!out->wakes) {
			out->wakes = r[i].wakes;
			memcpy(out->wake, r[i].wake, sizeof out->wake);
		}
		for (unsigned k = 0; k < LOAD_INTERVALS && k < r[i].n_intervals; k++)
			out->interval[k] += r[i].interval[k];
	}
	if (out->n_intervals > LOAD_INTERVALS)
		out->n_intervals = LOAD_INTERVALS;
}

static double per_second(const struct load_result *s)
{
	return s->wall_s > 0 ? (double)s->kernels / s->wall_s : 0;
}

static void extras_json(const struct options *o, const struct load_result *s)
{
	const struct latency *l = &s->latency;

	if (o->latency)
		printf(",\"latency\":{\"requests\":%u,\"p50_ms\":%.4f,\"p90_ms\":%.4f,"
		       "\"p99_ms\":%.4f,\"max_ms\":%.4f}",
		       l->requests, l->p50_ms, l->p90_ms, l->p99_ms, l->max_ms);
	if (o->off_s > 0) {
		fputs(",\"wakes_ns\":[", stdout);
		for (unsigned i = 0; i < s->wakes; i++)
			printf("%s%lld", i ? "," : "", (long long)s->wake[i]);
		fputs("]", stdout);
	}
	if (o->probe) {
		fputs(",\"probe\":", stdout);
		probe_print(&s->probe);
	}
}

static void report_json(const struct options *o, const struct load_result *s, unsigned n)
{
	printf("{\"kernel_ns\":%lld,\"grid\":%u,\"graph\":%u,\"procs\":%u,\"threads\":%u,"
	       "\"kernels\":%llu,\"wall_s\":%.4f,\"kernels_per_s\":%.2f,\"share\":%.5f,"
	       "\"share_first_s\":%.5f,\"share_after_2s\":",
	       (long long)o->kernel_ns, o->grid, o->graph, n, o->threads,
	       (unsigned long long)s->kernels, s->wall_s, per_second(s), s->share,
	       s->share_first_s);
	if (s->share_after_2s < 0)
		fputs("null", stdout);
	else
		printf("%.5f", s->share_after_2s);
	fputs(",\"intervals\":[", stdout);
	for (unsigned i = 0; i < s->n_intervals; i++)
		printf("%s%.5f", i ? "," : "", (double)s->interval[i]);
	fputs("]", stdout);
	extras_json(o, s);
	puts("}");
}

static void extras_text(const struct options *o, const struct load_result *s)
{
	const struct latency *l = &s->latency;

	if (o->latency)
		printf("latency of %u requests: median %.3f, 90 %% %.3f, 99 %% %.3f, most %.3f ms\n",
		       l->requests, l->p50_ms, l->p90_ms, l->p99_ms, l->max_ms);
	if (o->probe && s->probe.word[PROBE_KERNELS])
		printf("recorded on the GPU: %llu kernels ran %.3f s, interrupted %llu times for %.3f s\n",
		       (unsigned long long)s->probe.word[PROBE_KERNELS],
		       (double)s->probe.word[PROBE_RUN_NS] / 1e9,
		       (unsigned long long)s->probe.word[PROBE_GAPS],
		       (double)s->probe.word[PROBE_GAP_NS] / 1e9);
	else if (o->probe)
		puts("recorded on the GPU: nothing, this driver runs no kernels");
}

static void report_text(const struct options *o, const struct load_result *s, unsigned n)
{
	printf("kernels: %llu of %.3f ms x %u blocks", (unsigned long long)s->kernels,
	       (double)o->kernel_ns / 1e6, o->grid);
	if (o->graph)
		printf(", %u a graph", o->graph);
	if (n > 1)
		printf(", %u processes", n);
	printf(", in %.2f s (%.1f a second)\n", s->wall_s, per_second(s));
	fputs("GPU time by second:", stdout);
	for (unsigned i = 0; i < s->n_intervals; i++)
		printf(" %.1f", 100 * (double)s->interval[i]);
	printf(" %%\nGPU time: first second %.1f %%", 100 * s->share_first_s);
	if (s->share_after_2s >= 0)
		printf(", after 2 s %.1f %%", 100 * s->share_after_2s);
	printf(", all %.1f %%\n", 100 * s->share);
	extras_text(o, s);
}

void load_report(const struct options *o, const struct load_result *r, unsigned n)
{
	static struct load_result s;

	sum(r, n, &s);
	if (o->json)
		report_json(o, &s, n);
	else
		report_text(o, &s, n);
	fflush(stdout);
}
