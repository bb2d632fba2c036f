/* A fake libamd_smi.so: the ABI of amdsmi 7.0 over a script. The Python package binds every symbol when it is imported:
 * those that are not here stand in stubs.inc, which the build writes from the installed package. */
#define SCRIPT_NUMBERS \
    {"manual", 0}, {"now_s", 0}, {"delay_us", 0}, {"base_w", 200}, {"sensor_s", 0}, {"counter_s", 0}, {"gpus", 2}, \
    {"init_rc", 0}, {"power_rc", 0}, {"energy_rc", 0}, {"clock_rc", 0}, {"metrics_rc", 0}, {"cap_rc", 0}, \
    {"uuid_rc", 0}, {"current_w", -1}, {"average_w", -1}, {"socket_w", -1}, {"counter_offset", 0}, {"frozen", 0}, \
    {"gfx_mhz", 2100}, {"memory_mhz", 1300}, {"temperature", 61}, {"cap_uw", 750e6}, {"library_major", 26}, \
    {"version_rc", 0}, {"mi250", 0}, {"partitions", 0}, {"residencies", 1}, {"throttle_status", 0}, {"counter", 0}, {"ppt", 0}, \
    {"socket_thermal", 0}, {"hbm", 0}, {"vr", 0}, {"prochot", 0}, {"level", 0},
#include "script.h"
#include "settable.h"

enum { SUCCESS = 0, INVALID = 1, NOT_SUPPORTED = 2, NOT_FOUND = 31, NOT_INITIALISED = 32 };
#define ENTER(h) \
    if (!fake_open_count) return NOT_INITIALISED; \
    int g = index_of(h); \
    if (g < 0) return INVALID; \
    double t = now_s(); \
    (void)t
#define FAIL(name) do { if (number(name)) return (int)number(name); } while (0)

static char devices[MAX_DEVICES];
static int index_of(void *h) {
    long i = (char *)h - devices;
    return h && i >= 0 && i < (long)number("gpus") ? (int)i : -1;
}

API int amdsmi_init(uint64_t flags) { (void)flags; FAIL("init_rc"); fake_open_count++; return SUCCESS; }
API int amdsmi_shut_down(void) { fake_open_count--; return SUCCESS; }
API int amdsmi_status_code_to_string(int status, const char **text) { (void)status; *text = "fake"; return SUCCESS; }

typedef struct { uint32_t major, minor, release; uint32_t padding; const char *build; } version_t;
API int amdsmi_get_lib_version(version_t *v) {
    FAIL("version_rc");
    *v = (version_t){ (uint32_t)number("library_major"), 1, 0, 0, "f" };
    return SUCCESS;
}
/* One socket has all devices. */
API int amdsmi_get_socket_handles(uint32_t *count, void **sockets) {
    if (sockets) sockets[0] = &devices[0];
    *count = 1;
    return SUCCESS;
}
API int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **h) {
    (void)socket;
    *count = (uint32_t)number("gpus");
    for (uint32_t g = 0; h && g < *count; g++) h[g] = &devices[g];
    return SUCCESS;
}
API int amdsmi_get_processor_handle_from_bdf(uint64_t bdf, void **h) {
    int g = (int)(bdf >> 8 & 0xff) - 0x20;
    if (number("partitions") && !g) { g = (int)(bdf & 7); bdf -= (uint64_t)g; } /* as many functions of one address */
    if (bdf >> 16 || bdf & 0xff || g < 0 || g >= (int)number("gpus")) return NOT_FOUND;
    *h = &devices[g];
    return SUCCESS;
}
typedef struct {
    char market_name[256]; uint32_t vendor_id; char vendor_name[256]; uint32_t subvendor_id; uint64_t device_id;
    uint32_t rev_id; char asic_serial[256]; uint32_t oam_id, num_compute_units, padding; uint64_t target; uint32_t subsystem;
    uint32_t reserved[21];
} asic_t;
API int amdsmi_get_gpu_asic_info(void *h, asic_t *a) {
    ENTER(h);
    memset(a, 0, sizeof *a);
    snprintf(a->market_name, 256, "%s", number("mi250") ? "AMD Instinct MI250X" : "AMD Instinct Fake");
    snprintf(a->asic_serial, 256, "0xABC%d", g);
    return SUCCESS;
}
API int amdsmi_get_gpu_compute_partition(void *h, char *text, uint32_t length) {
    ENTER(h);
    snprintf(text, length, "%s", number("partitions") ? "CPX" : "SPX");
    return SUCCESS;
}
API int amdsmi_get_gpu_device_uuid(void *h, unsigned *length, char *text) {
    ENTER(h);
    FAIL("uuid_rc");
    snprintf(text, *length, "%06xff-74a1-1000-80e5-%012x", 0xabcu, (unsigned)g);
    return SUCCESS;
}

static uint32_t watts(const char *name, double w) { return (uint32_t)(number(name) < 0 ? lround(w) : number(name)); }
typedef struct {
    uint64_t socket; uint32_t current, average; uint64_t gfx, soc, mem; uint32_t limit, padding; uint64_t reserved[18];
} power_t;
API int amdsmi_get_power_info(void *h, power_t *p) {
    ENTER(h);
    FAIL("power_rc");
    memset(p, 0, sizeof *p);
    double w = sensed_w(g, t);
    p->current = watts("current_w", w);
    p->average = watts("average_w", w);
    p->socket = watts("socket_w", w);
    return SUCCESS;
}
API int amdsmi_get_energy_count(void *h, uint64_t *count, float *resolution_uj, uint64_t *timestamp) {
    ENTER(h);
    FAIL("energy_rc");
    *resolution_uj = 15.25f; /* exact in binary, unlike the 15.3 of real devices: the test's answers are exact too */
    *count = (uint64_t)(number("counter_offset") + (number("frozen") ? 1 : counted_j(g, t) * 1e6 / 15.25 + 1));
    *timestamp = (uint64_t)(t * 1e9);
    return SUCCESS;
}
typedef struct { uint64_t cap, standard, dpm, min, max, reserved[3]; } cap_t;
API int amdsmi_get_power_cap_info(void *h, uint32_t i, cap_t *c) {
    ENTER(h);
    if (unreadable()) return 999;
    (void)i;
    FAIL("cap_rc");
    memset(c, 0, sizeof *c);
    c->cap = settable()->limit_w[g] ? (uint64_t)llround(settable()->limit_w[g] * 1e6) : (uint64_t)number("cap_uw");
    c->standard = c->max = 750000000;
    c->min = 200000000;
    return SUCCESS;
}
API int amdsmi_set_power_cap(void *h, uint32_t sensor, uint64_t cap_uw) {
    ENTER(h);
    return sensor ? INVALID : put(&settable()->limit_w[g], cap_uw / 1e6);
}
typedef struct { uint32_t clk, min, max; uint8_t locked, sleep, padding[2]; uint32_t reserved[4]; } clock_t_;
API int amdsmi_get_clock_info(void *h, int kind, clock_t_ *c) {
    ENTER(h);
    if (unreadable()) return 999;
    FAIL("clock_rc");
    memset(c, 0, sizeof *c);
    double locked_mhz = settable()->locked_mhz[g];
    double gfx_mhz = locked_mhz && locked_mhz < number("gfx_mhz") ? locked_mhz : number("gfx_mhz");
    c->clk = (uint32_t)(kind == 0 ? gfx_mhz : kind == 4 ? number("memory_mhz") : 0);
    if (kind == 0) { c->min = 132; c->max = 2100; }
    return SUCCESS;
}
/* Performance levels: 0 is automatic, 8 determinism. Other levels come from the script alone. */
API int amdsmi_set_gpu_perf_determinism_mode(void *h, uint64_t mhz) {
    ENTER(h);
    return put(&settable()->locked_mhz[g], (double)mhz);
}
API int amdsmi_set_gpu_perf_level(void *h, int level) { ENTER(h); return level ? NOT_SUPPORTED : put(&settable()->locked_mhz[g], 0); }
API int amdsmi_get_gpu_perf_level(void *h, int *level) {
    ENTER(h);
    if (unreadable()) return 999;
    *level = number("level") ? (int)number("level") : settable()->locked_mhz[g] ? 8 : 0;
    return SUCCESS;
}
API int amdsmi_get_temp_metric(void *h, int sensor, int metric, int64_t *c) {
    ENTER(h);
    (void)metric;
    if (sensor != 1) return NOT_SUPPORTED; /* it has a hot spot only, as MI300 does */
    *c = (int64_t)number("temperature");
    return SUCCESS;
}

/* The head of amdsmi_gpu_metrics_t up to the counts of throttled time; what follows is left as the caller made it. */
typedef struct {
    uint16_t size; uint8_t format, content;
    uint16_t temperatures[6], activities[3], average_socket_power;
    uint64_t energy, system_clock;
    uint16_t average_clocks[7], current_clocks[7];
    uint32_t throttle_status;
    uint16_t fan, pcie_width, pcie_speed, padding0;
    uint32_t gfx_activity, mem_activity;
    uint16_t hbm_temperatures[4];
    uint64_t firmware_time;
    uint16_t voltages[3], padding1;
    uint64_t independent_throttle_status;
    uint16_t current_socket_power, vcn[4], padding2;
    uint32_t lock_status;
    uint16_t xgmi_width, xgmi_speed;
    uint32_t padding3;
    uint64_t pcie[5], xgmi_read[8], xgmi_write[8];
    uint16_t gfxclks[8], socclks[4], vclks[4], dclks[4], jpeg[32];
    uint32_t naks[2];
    uint64_t counter, prochot, ppt, socket_thermal, vr, hbm;
} metrics_t;
API int amdsmi_get_gpu_metrics_info(void *h, metrics_t *m) {
    ENTER(h);
    FAIL("metrics_rc");
    memset(m, 0, sizeof *m);
    m->throttle_status = (uint32_t)number("throttle_status");
    if (number("residencies")) {
        m->counter = (uint64_t)number("counter");
        m->prochot = (uint64_t)number("prochot");
        m->ppt = (uint64_t)number("ppt");
        m->socket_thermal = (uint64_t)number("socket_thermal");
        m->vr = (uint64_t)number("vr");
        m->hbm = (uint64_t)number("hbm");
    } else m->counter = m->prochot = m->ppt = m->socket_thermal = m->vr = m->hbm = UINT64_MAX;
    return SUCCESS;
}

/* Sleeps 100 ms on real devices: counted as something that is never to be called, like whatever changes a device. */
API int amdsmi_get_violation_status(void) { fake_write_count++; return NOT_SUPPORTED; }
#include "stubs.inc"
