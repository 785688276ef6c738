/* All kernels for one instruction set. Each isa_*.c includes it, and defines LANES, TABLE, perhaps TARGET and the HAS_... */
#include "kernels.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* The target holds for the functions below, and not for those of the headers above. */
#define DO_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define PUSH_TARGET(target) DO_PRAGMA(clang attribute push(__attribute__((target(target))), apply_to = function))
#else
#define PUSH_TARGET(name) DO_PRAGMA(GCC target(name))
#endif
#if defined(TARGET)
PUSH_TARGET(TARGET)
#endif

#ifndef HAS_BF16_PAIRS
#define HAS_BF16_PAIRS 0
#endif
#ifndef HAS_TILES
#define HAS_TILES 0
#endif

#include "simd.h"
#include "tiles.inc.h"
#include "regions.inc.h"
#include "attention.inc.h"
#include "sampling.inc.h"
#include "rows.inc.h"
#include "recurrence.inc.h"
#include "linear.inc.h"

#if defined(TARGET) && defined(__clang__)
#pragma clang attribute pop
#endif

const struct kernels TABLE = {attend, argmax, draw, linear, pack, unpack, PANEL_OUTPUTS, norm, gate, recurrence};
