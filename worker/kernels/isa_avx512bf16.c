/* The kernels for x86-64 with AVX-512 F, BW, DQ, VL, BF16 and VNNI. */
#if defined(__x86_64__)
#define LANES 16
#define HAS_BF16_PAIRS 1
#define TABLE kernels_avx512bf16
#define TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,fma"
#include "isa.inc.h"
#endif
