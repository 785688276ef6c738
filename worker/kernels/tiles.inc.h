/* The tile registers of AMX: how they are configured. */
#if HAS_TILES
enum { AMX_ROWS = 16, AMX_INPUTS = 32, AMX_BYTES = 64 }; /* inputs of an instruction: bfloat16, int8 */

static _Thread_local int64_t amx_rows; /* for which the registers are configured; 0: none */

/* Registers 0 to 6 have as many rows of 64 bytes, register 7 has 16. */
static void configure_registers(int64_t num_rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t num_rows[16];
    } registers = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        registers.bytes_per_row[i] = 64;
        registers.num_rows[i] = i < 7 ? num_rows : 16;
    }
    _tile_loadconfig(&registers);
    amx_rows = num_rows;
}
#endif

/* Others may configure the registers before the next call. */
static inline void release_registers(void)
{
#if HAS_TILES
    if (amx_rows > 0)
        _tile_release();
    amx_rows = 0;
#endif
}
