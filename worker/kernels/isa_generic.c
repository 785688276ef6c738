/* The kernels for every machine: the instructions that the compiler takes by default. */
#define LANES 4
#define TABLE kernels_generic
#include "isa.inc.h"
