/* calibrate: measures on a GPU what the law of shares and the simulated GPU take for granted, and
 * prints it as JSON. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "calibrate.h"

const char *const program = "calibrate";
const struct config *config;

static const char help[] =
	"usage: calibrate [OPTION]...\n"
	"Measures how a GPU is shared by itself and what calls cost, and prints it as JSON.\n"
	"\n"
	"  --gpu N           device ordinal (0)\n"
	"  --spec FILE       write a machine for `tranche run --sim FILE` that is like this GPU\n"
	"                    (FILE ends in .yaml)\n"
	"  --items LIST      only these, with commas: loss slices inflation cost handover\n"
	"                    preemption capture nvml\n"
	"  --quick           a look: about a fifth of the time\n"
	"  --ptx             only print the code of the kernels\n"
	"  --check           only say whether there is a GPU: exit status 0, or 3\n"
	"  --libcuda PATH    driver library (libcuda.so.1)\n"
	"  --libnvml PATH    NVML (libnvidia-ml.so.1)\n";

enum {
	OPT_GPU = 256, OPT_SPEC, OPT_ITEMS, OPT_QUICK, OPT_CHECK, OPT_PTX, OPT_LIBCUDA, OPT_LIBNVML,
	OPT_HELP,
};
static const struct option longs[] = {
	{"gpu", 1, NULL, OPT_GPU},	   {"spec", 1, NULL, OPT_SPEC},
	{"items", 1, NULL, OPT_ITEMS},	   {"quick", 0, NULL, OPT_QUICK},
	{"ptx", 0, NULL, OPT_PTX},	   {"check", 0, NULL, OPT_CHECK},
	{"libcuda", 1, NULL, OPT_LIBCUDA}, {"libnvml", 1, NULL, OPT_LIBNVML},
	{"help", 0, NULL, OPT_HELP},	   {NULL, 0, NULL, 0},
};

static struct {
	const char *spec, *items;
	bool check;
} asked;

static void parse(struct config *c, int argc, char **argv)
{
	int o;

	while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1)
		switch (o) {
		case OPT_GPU: c->gpu = atoi(optarg); break;
		case OPT_SPEC: asked.spec = optarg; break;
		case OPT_ITEMS: asked.items = optarg; break;
		case OPT_QUICK: c->scale = 0.2; break;
		case OPT_CHECK: asked.check = true; break;
		case OPT_PTX: fputs(kernels_text(), stdout); exit(0);
		case OPT_LIBCUDA: c->libcuda = optarg; break;
		case OPT_LIBNVML: c->libnvml = optarg; break;
		case OPT_HELP: fputs(help, stdout); exit(0);
		default: exit(2);
		}
	if (optind < argc)
		die("%s: not an option (calibrate --help)", argv[optind]);
}

static bool wanted(const char *item)
{
	size_t n = strlen(item);

	for (const char *p = asked.items; p && *p; p += strcspn(p, ",") + (p[strcspn(p, ",")] == ','))
		if (!strncmp(p, item, n) && (p[n] == ',' || !p[n]))
			return true;
	return !asked.items;
}

/* Values of `identity` in the shared memory. */
enum { RUNS, VERSION };

static void identity(struct together *t, unsigned number)
{
	int n = 0;

	(void)number;
	t->value[RUNS] = kernels_run();
	MUST(cuDriverGetVersion(&n));
	t->value[VERSION] = n;
	MUST(cuDeviceGetName(t->text[0], sizeof *t->text, driver_device()));
}

/* The simulator's key for a product, by what is in its name. */
static const char *model(const char *name)
{
	static const char *const known[][2] = {
		{"H200", "h200-141g"},	    {"H100", "h100-80g"},      {"A100-SXM4-40", "a100-40g"},
		{"A100-PCIE-40", "a100-40g"}, {"A100", "a100-80g"},	{"V100-SXM2-16", "v100-16g"},
		{"V100-PCIE-16", "v100-16g"}, {"V100", "v100-32g"},	{"T4", "t4"},
	};

	for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
		if (strstr(name, known[i][0]))
			return known[i][1];
	return "h100-80g";
}

static void key(FILE *f, const char *name, double v)
{
	if (isfinite(v))
		fprintf(f, "%s: %.0f\n", name, floor(v + 0.5));
}

static void write_spec(const struct spec *s, const char *name)
{
	FILE *f = fopen(asked.spec, "w");

	if (!f)
		die("cannot write %s", asked.spec);
	fprintf(f, "# as measured on: %s\n", name);
	key(f, "slice_us", s->slice_us);
	key(f, "switch_us", s->switch_us);
	key(f, "launch_ns", s->launch_ns);
	key(f, "sync_ns", s->sync_ns);
	key(f, "queue_depth", s->queue_depth);
	fprintf(f, "gpus:\n- {model: %s}\n", model(name));
	if (fclose(f))
		die("cannot write %s", asked.spec);
}

static void measure(struct spec *s)
{
	json_open("items", '{');
	if (wanted("loss"))
		item_loss();
	if (wanted("slices"))
		item_slices(s);
	if (wanted("inflation"))
		item_inflation();
	if (wanted("cost"))
		item_cost(s);
	if (wanted("handover"))
		item_handover();
	if (wanted("preemption"))
		item_preemption();
	if (wanted("capture"))
		item_capture();
	if (wanted("nvml"))
		item_nvml();
	json_close('}');
}

static void print_spec(const struct spec *s)
{
	json_open("spec", '{');
	json_number("slice_us", s->slice_us);
	json_number("switch_us", s->switch_us);
	json_number("launch_ns", s->launch_ns);
	json_number("sync_ns", s->sync_ns);
	json_number("queue_depth", s->queue_depth);
	json_close('}');
}

int main(int argc, char **argv)
{
	static struct config c = {.libcuda = "libcuda.so.1", .libnvml = "libnvidia-ml.so.1", .scale = 1};
	struct spec s = {NAN, NAN, NAN, NAN, NAN};
	struct together *t;

	parse(&c, argc, argv);
	config = &c;
	t = together_new();
	if (!run_together(t, 1, identity, NULL))
		return asked.check ? 3 : 1;
	if (asked.check) {
		puts(t->text[0]);
		return 0;
	}
	json_open(NULL, '{');
	json_text("label", t->value[RUNS] > 0 ? "gpu" : "sim");
	json_text("gpu", t->text[0]);
	json_number("cuda_version", t->value[VERSION]);
	measure(&s);
	print_spec(&s);
	json_close('}');
	if (asked.spec)
		write_spec(&s, t->text[0]);
	return 0;
}
