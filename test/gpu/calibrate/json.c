#include <math.h>
#include <stdio.h>
#include "calibrate.h"

static unsigned depth;
static bool any[16]; /* by depth: something stands before */

static void begin(const char *name)
{
	printf("%s\n%*s", any[depth] ? "," : "", 2 * (int)depth, "");
	any[depth] = true;
	if (name)
		printf("\"%s\": ", name);
}

void json_open(const char *name, char bracket)
{
	if (depth)
		begin(name);
	putchar(bracket);
	any[++depth] = false;
}

void json_close(char bracket)
{
	depth--;
	printf("\n%*s%c", 2 * (int)depth, "", bracket);
	if (!depth)
		putchar('\n');
	fflush(stdout);
}

void json_number(const char *name, double v)
{
	begin(name);
	if (isfinite(v))
		printf("%.10g", floor(v * 1e4 + 0.5) / 1e4);
	else
		fputs("null", stdout);
}

void json_text(const char *name, const char *v)
{
	begin(name);
	putchar('"');
	for (; *v; v++)
		if (*v == '"' || *v == '\\' || (unsigned char)*v < ' ')
			printf("\\u%04x", (unsigned)*v);
		else
			putchar(*v);
	putchar('"');
}

void json_bool(const char *name, bool v)
{
	begin(name);
	fputs(v ? "true" : "false", stdout);
}
