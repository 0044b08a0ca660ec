#include "suite.h"
const struct suite_test slice_tests[] = {{.name = NULL}};
