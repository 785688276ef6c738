/* How many threads a kernel uses. The results are the same with any number.
 *
 * A region ends when its last thread is done. If another process has that thread's core, the others wait for milliseconds,
 * in each of about eight regions a layer. So after a region that took too long, small regions use one thread for a while. */
enum {
    SMALL_WORK = 64 * 1024, /* multiplications that are not worth a second thread */
    MEDIUM_WORK = 64 << 20, /* those that are done alone while the cores are busy: about a millisecond */
    SLOWEST_NS = 2,         /* for a multiplication, on any machine */
    LATE_NS = 1000 * 1000,  /* no other process has a core for less than this */
    BUSY_NS = 100 * 1000 * 1000,
};

static int64_t busy_until_ns;

struct region {
    int64_t work, began_ns; /* work: in multiplications, about */
    int num_threads;
};

static struct region begin_region(int64_t work, int64_t num_threads)
{
    int64_t now = (int64_t)(1e9 * omp_get_wtime());
    int is_busy = now < __atomic_load_n(&busy_until_ns, __ATOMIC_RELAXED);
    return (struct region){work, now, work < (is_busy ? MEDIUM_WORK : SMALL_WORK) ? 1 : (int)num_threads};
}

static void end_region(struct region region)
{
    int64_t now = (int64_t)(1e9 * omp_get_wtime());
    if (now > region.began_ns + SLOWEST_NS * region.work + LATE_NS)
        __atomic_store_n(&busy_until_ns, now + BUSY_NS, __ATOMIC_RELAXED);
}
