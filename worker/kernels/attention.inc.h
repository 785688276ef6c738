/* Paged attention: each tile of query vectors runs over its keys and values where they lie in the pool.
 *
 * A tile is some tokens of one row, or some rows of one token each whose keys begin alike, and some key heads: one head for
 * chunks, which reuse what they read, and all heads for decodes if there are enough rows, so that memory is read in its
 * order. G = Hq / Hkv query heads share a key head. The Q query vectors of a tile are ordered by key head, member (token or
 * row), and head of the G. The softmax is computed online (Milakov, Gimelshein: Online normalizer calculation for softmax,
 * 2018): a span of keys at a time, with the running maximum and sum of each query vector.
 *
 * The few query vectors of a decode lie in rows: a register holds entries of one vector. More vectors of a head lie in
 * lanes: a register holds the same entry of LANES vectors (a column), so nothing is added across a register.
 *
 * Spans begin at multiples of SPAN, and each sum has one order in all tiles. So a token's result has the same bits whatever
 * the other rows are, whatever rows it shares keys with, and however its sequence was divided into chunks. (For blocks
 * that are no multiple of LANES, a sliding window may change the order.)
 */

#include "attention_tile.inc.h"
#include "attention_rows.inc.h"
#include "attention_lanes.inc.h"
#include "attention_matrices.inc.h"

/* Attend to positions [begin, end), span by span, with some members of a tile. */
static void attend_part(const struct attention *c, const struct scratch *s, const struct tile *tile, int64_t row,
                        int64_t first_member, int64_t num_members, int64_t begin, int64_t end)
{
    int64_t group = c->num_heads / c->num_kv_heads, per_head = (int64_t)tile->num_rows * tile->num_tokens * group;
    int64_t dim = padded(c->key_dim), is_in_lanes = num_members * group > ROW_VECTORS;
    int64_t num_heads = is_in_lanes ? 1 : tile->num_heads;
    for (int64_t head = 0; head < tile->num_heads; head += num_heads) {
        struct part part = {row, first_member, num_members, head, num_heads, begin, 0, end};
#if HAS_TILES
        if (is_in_lanes && uses_matrices(c)) {
            pair_queries(s->query + (head * per_head + first_member * group) * dim, num_members * group, dim, s->turned);
            for (; part.begin < end; part.begin += part.count) {
                part.count = smaller(SPAN - part.begin % SPAN, end - part.begin);
                attend_matrices(c, s, tile, &part);
            }
            continue;
        }
#endif
        if (is_in_lanes)
            turn_queries(s->query + (head * per_head + first_member * group) * dim, num_members * group, dim, s->turned);
        for (; part.begin < end; part.begin += part.count) {
            part.count = smaller(SPAN - part.begin % SPAN, end - part.begin);
            if (is_in_lanes)
                attend_lanes(c, s, tile, &part, part.begin == begin);
            else
                attend_rows(c, s, tile, &part);
        }
    }
}

/* The keys that the tokens of a tile attend to, for a window of 4:
 *
 *     position        0 1 2 3 4 5 6 7
 *     token at 5          x x x x          begin = 2, the first one's
 *     token at 6            x x x x        end = 7, the last one's
 *
 * Rows with common positions attend to these together, then each to its own.
 */
static void attend_tile(const struct attention *c, const struct scratch *s, const struct tile *tile)
{
    read_queries(c, s, tile);
    if (tile->num_rows > 1)
        attend_part(c, s, tile, row_of(c, tile, 0), 0, tile->num_rows, 0, tile->common);
    for (int64_t i = 0; i < tile->num_rows; i++) {
        int64_t position = origin_of_member(c, tile, i).position, begin = tile->common;
        if (c->window > 0 && position + 1 - c->window > begin)
            begin = position + 1 - c->window;
        if (c->block_size % LANES == 0)
            begin = begin / LANES * LANES; /* no group of keys crosses a block then */
        attend_part(c, s, tile, row_of(c, tile, i), i, tile->num_tokens, begin, position + tile->num_tokens);
    }
    write_output(c, s, tile);
}

/* Write keys and values, in the order of the memory: those of tokens, counted over all rows, and of heads from `first` up to
 * `end`, where a token counts as many as it has heads. */
static void write_pool(const struct attention *c, const struct scratch *s, int64_t first, int64_t end)
{
    const struct attention_rows *rows = c->rows;
    int64_t token = first / c->num_kv_heads, head = first % c->num_kv_heads;
    for (int64_t row = 0, left = end - first; left > 0; row++)
        for (; left > 0 && token < rows->query_starts[row + 1]; token++, head = 0) {
            int64_t position = rows->kv_lens[row] - rows->query_starts[row + 1] + token;
            int64_t slot = slot_of(c, row, position) * c->num_kv_heads;
            for (; left > 0 && head < c->num_kv_heads; head++, left--) {
                int64_t to = slot + head, keys = token * qkv_width(c) + c->num_heads * c->key_dim;
                int64_t values = keys + c->num_kv_heads * c->key_dim;
                widen(s->widened, c->qkv, keys + head * c->key_dim, c->key_dim, c->dtype);
                prepare(c, s->widened, c->key_norm, position);
                narrow(c->keys, to * c->key_dim, s->widened, c->key_dim, c->pool_dtype, 1.0f);
                widen(s->widened, c->qkv, values + head * c->value_dim, c->value_dim, c->dtype);
                narrow(c->values, to * c->value_dim, s->widened, c->value_dim, c->pool_dtype, 1.0f);
            }
        }
}

/* Return how many rows, from one in the order on, attend together to the `common` positions that they have in common. With
 * a window that ends before the last position they do not. */
static int64_t rows_together(const struct attention *c, int64_t first, int32_t *common)
{
    const struct attention_rows *rows = c->rows;
    int64_t count = 1, most = 1 + rows->num_decodes / (ROWS_PER_THREAD * rows->num_threads);
    int64_t tiles = (rows->num_decodes + TILE_ROWS_MAX * rows->num_threads - 1) / (TILE_ROWS_MAX * rows->num_threads);
    int64_t even = (rows->num_decodes + tiles * rows->num_threads - 1) / (tiles * rows->num_threads); /* as many for each thread */
    most = smaller(even, most > ROW_VECTORS ? padded(most) : most); /* no lanes without a row */
    *common = 0;
    while (count < most && first + count < rows->num_decodes) {
        int64_t shared = rows->common[first + count - 1] / SPAN * SPAN;
        int32_t longer = rows->kv_lens[rows->order[first + count - 1]], other = rows->kv_lens[rows->order[first + count]];
        int is_outside = c->window > 0 && (longer > c->window || other > c->window);
        if (shared == 0 || is_outside || (count > 1 && 2 * shared < *common))
            break;
        *common = (int32_t)(count > 1 ? smaller(*common, shared) : shared);
        count++;
    }
    return count;
}

/* Return how many products of query vectors and keys a chunk has, or more. */
static int64_t work_of(const struct attention *c, int64_t row)
{
    return (c->rows->query_starts[row + 1] - c->rows->query_starts[row]) * (int64_t)c->rows->kv_lens[row] * c->num_heads;
}

/* Return the tokens of a tile of a chunk. Each of its query vectors, with its sums and the scores of a span, takes a part of
 * the second-level cache. Keys and values are read once for each tile. So the tiles are large, unless one would be too much
 * of the work of all. */
static int64_t tokens_of_tile(const struct attention *c, int64_t row, int64_t work)
{
    int64_t most = TILE_FLOATS / (c->key_dim + c->value_dim + SPAN);
    int64_t share = work / (TILES_PER_THREAD * c->rows->num_threads * (int64_t)c->rows->kv_lens[row]);
    int64_t vectors = smaller(most, share) / TILE_VECTORS * TILE_VECTORS;
    int64_t tokens = (vectors > TILE_VECTORS ? vectors : TILE_VECTORS) / (c->num_heads / c->num_kv_heads);
    return tokens > 1 ? tokens : 1;
}

/* List the tiles, about the most expensive ones first: chunks from their ends, then decodes. Return their number. */
static int64_t list_tiles(const struct attention *c, struct tile *tiles)
{
    const struct attention_rows *rows = c->rows;
    int64_t count = 0, work = 0;
    int64_t heads = rows->num_rows >= ROWS_PER_THREAD * rows->num_threads ? c->num_kv_heads : 1;
    for (int64_t i = rows->num_decodes; i < rows->num_rows; i++)
        work += work_of(c, rows->order[i]);
    for (int64_t i = rows->num_decodes; i < rows->num_rows; i++) {
        int64_t step = tokens_of_tile(c, rows->order[i], work);
        int64_t num_tokens = rows->query_starts[rows->order[i] + 1] - rows->query_starts[rows->order[i]];
        for (int64_t first = (num_tokens - 1) / step * step; first >= 0; first -= step)
            for (int64_t head = 0; head < c->num_kv_heads; head++)
                tiles[count++] = (struct tile){(int32_t)i,    1, (int32_t)first, (int32_t)smaller(step, num_tokens - first),
                                               (int32_t)head, 1, 0};
    }
    for (int64_t i = 0; i < rows->num_decodes;) {
        int32_t common, together = (int32_t)rows_together(c, i, &common);
        for (int64_t head = 0; head < c->num_kv_heads; head += heads)
            tiles[count++] = (struct tile){(int32_t)i, together, 0, 1, (int32_t)head, (int32_t)heads, common};
        i += together;
    }
    return count;
}

static int attend(const struct attention *c)
{
    struct tile *tiles = malloc(sizeof(struct tile) * c->rows->query_starts[c->rows->num_rows] * c->num_kv_heads);
    if (tiles == NULL)
        return -1;
    int64_t num_tiles = list_tiles(c, tiles), vectors = 0, products = 0;
    for (int64_t i = 0; i < num_tiles; i++)
        vectors = num_vectors(c, &tiles[i]) > vectors ? num_vectors(c, &tiles[i]) : vectors;
    for (int64_t i = 0; i < c->rows->num_rows; i++)
        products += (int64_t)(c->rows->query_starts[i + 1] - c->rows->query_starts[i]) * c->rows->kv_lens[i];
    struct region region = begin_region(products * c->num_heads * (c->key_dim + c->value_dim), c->rows->num_threads);
    size_t scratch_size = (sizeof(float) * scratch_floats(c, vectors) + 63) / 64 * 64;
    char *memory = aligned_alloc(64, scratch_size * region.num_threads);
    if (memory == NULL) {
        free(tiles);
        return -1;
    }
#pragma omp parallel num_threads(region.num_threads)
    {
        struct scratch s = divide_scratch(c, vectors, (float *)(memory + scratch_size * omp_get_thread_num()));
        int64_t written = c->rows->query_starts[c->rows->num_rows] * c->num_kv_heads, thread = omp_get_thread_num();
        write_pool(c, &s, written * thread / omp_get_num_threads(), written * (thread + 1) / omp_get_num_threads());
#pragma omp barrier /* a tile reads keys that any thread has written */
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < num_tiles; i++)
            attend_tile(c, &s, &tiles[i]);
        release_registers();
    }
    end_region(region);
    free(tiles);
    free(memory);
    return 0;
}
