/* The kernels for x86-64 with AVX2 and FMA. */
#if defined(__x86_64__)
#define LANES 8
#define TABLE kernels_avx2
#define TARGET "avx2,fma"
#include "isa.inc.h"
#endif
