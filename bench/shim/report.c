#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "bench.h"

static FILE *json;
/* Cases run in processes of their own, which share the file and these counts. */
static struct {
	unsigned rows, missed;
} *count;

void die(const char *fmt, ...)
{
	va_list ap;

	fputs("bench-shim: ", stderr);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fputc('\n', stderr);
	exit(1);
}

void report_open(const char *path)
{
	count = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (count == MAP_FAILED)
		die("out of memory");
	if (!path)
		return;
	json = fopen(path, "w");
	if (!json)
		die("cannot write %s", path);
	fputs("[", json);
	fflush(json);
}

static const char *group = "";

void report_group(const char *name)
{
	group = name;
}

static void row(const char *name, const char *metric, const char *unit, double value, double lo,
		double hi, double target)
{
	if (!json)
		return;
	fprintf(json, "%s\n {\"case\":\"%s: %s\",\"metric\":\"%s\",\"unit\":\"%s\",\"value\":%.4f,",
		count->rows++ ? "," : "", group, name, metric, unit, value);
	fprintf(json, "\"spread\":[%.4f,%.4f],\"target\":", lo, hi);
	if (target == NO_TARGET)
		fputs("null", json);
	else
		fprintf(json, "%.2f", target);
	fputs(",\"better\":\"lower\",\"label\":\"sim\"}", json);
	fflush(json);
}

void report_head(const char *title, const char *unit)
{
	printf("\n%s (%s)\n%-44s %27s   %27s   %8s %8s\n", title, unit, "",
	       "direct: min median p99", "ours: min median p99", "+min", "+median");
}

void report_added(const char *name, const char *unit, struct stats d, struct stats o, double target)
{
	double at_min = o.min - d.min, at_median = o.median - d.median;
	bool ok = target == NO_TARGET || (at_min <= target && at_median <= target);

	int digits = strcmp(unit, "ms") ? 1 : 3;
	printf("%-44s %9.*f %8.*f %8.*f   %9.*f %8.*f %8.*f   %+8.*f %+8.*f", name, digits, d.min,
	       digits, d.median, digits, d.p99, digits, o.min, digits, o.median, digits, o.p99,
	       digits, at_min, digits, at_median);
	if (target != NO_TARGET)
		printf("  target +%g: %s", target, ok ? "met" : "MISSED");
	putchar('\n');
	fflush(stdout);
	count->missed += !ok;
	row(name, "added at min", unit, at_min, at_min, at_min, target);
	row(name, "added at median", unit, at_median, o.p25 - d.median, o.p75 - d.median, target);
	row(name, "added at p99", unit, o.p99 - d.p99, o.p99 - d.p99, o.p99 - d.p99, NO_TARGET);
	row(name, "direct median", unit, d.median, d.p25, d.p75, NO_TARGET);
}

void report_value(const char *name, const char *metric, const char *unit, double value)
{
	printf("%-44s %s: %.3f %s\n", name, metric, value, unit);
	fflush(stdout);
	row(name, metric, unit, value, value, value, NO_TARGET);
}

unsigned report_close(void)
{
	if (json) {
		fputs("\n]\n", json);
		fclose(json);
	}
	return count->missed;
}
