#include "suite.h"
const struct suite_test share_tests[] = {{.name = NULL}};
