#include "suite.h"
const struct suite_test life_tests[] = {{.name = NULL}};
