#include <math.h>
#include <stdlib.h>
#include "calibrate.h"

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double quantile(double *v, unsigned n, double q)
{
	unsigned i = (unsigned)(q * n);

	if (!n)
		return NAN;
	qsort(v, n, sizeof *v, by_value);
	return v[i < n ? i : n - 1];
}

double mean(const double *v, unsigned n)
{
	double sum = 0;

	for (unsigned i = 0; i < n; i++)
		sum += v[i];
	return n ? sum / n : NAN;
}
