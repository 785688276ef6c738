/* The kernels for x86-64 with AVX-512 F, BW, DQ and VL. */
#if defined(__x86_64__)
#define LANES 16
#define TABLE kernels_avx512
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,fma"
#include "isa.inc.h"
#endif
