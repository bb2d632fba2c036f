/* A fake libnvidia-ml.so.1: the real NVML ABI over a script. With -DOLD_DRIVER it lacks what an R470 driver lacks. With
 * -DSIMULATED_GPU there is no script: power, energy, clock, throttling and the use of memory and SMs are those of
 * tests/simulated_gpu. */
#define SCRIPT_NUMBERS \
    {"manual", 0}, {"now_s", 0}, {"delay_us", 0}, {"base_w", 100}, {"sensor_s", 0}, {"counter_s", 0}, {"gpus", 2}, \
    {"architecture", 9}, {"pci_device_id", 0x2335}, {"init_rc", 0}, {"lost", 0}, {"usage_rc", 0}, {"energy_rc", 0}, \
    {"instant_rc", 0}, {"average_rc", 0}, {"field_energy_rc", 0}, {"fields_rc", 0}, {"clock_rc", 0}, \
    {"reasons_rc", 0}, {"limit_rc", 0}, {"temperature_rc", 0}, {"temperature_v_rc", 0}, {"sm_mhz", 1980}, {"memory_mhz", 3201}, \
    {"temperature_c", 55}, {"reasons", 0}, {"limit_w", 700}, {"default_w", 700}, {"counter_offset_mj", 0}, \
    {"counter_width", 0}, {"mig", 0}, {"instant_type", 1}, {"gpm", 1}, {"gpm_rc", 0}, {"gpm_tensor_rc", 0}, \
    {"gpm_sm", 88.5}, {"gpm_occupancy", 42.25}, {"gpm_tensor", 61.5}, {"gpm_dram", 33.25}, {"gpm_rx", 20000}, \
    {"gpm_tx", 10000}, {"nvlink", 0}, {"p2p_rc", 0},
#include "script.h"
#include "settable.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15, MISMATCH = 25 };

typedef struct device *device_t;
static char devices[MAX_DEVICES];

#ifdef SIMULATED_GPU
#define NAME "Simulated GPU (no hardware)"
#define LEAST_W 75
static int num_devices(void) { return simulated_devices(); }
static int fault(void) { return simulated_fault(); }
static double limit_of(int g) { return simulated_limit_w(g); }
static double clock_of(int g, double t) { return number("sm_mhz") * simulated_clock(g, t); }
static unsigned long long reasons_of(int g, double t) { return simulated_clock(g, t) < 1 ? 4 : 0; } /* power cap */
#else
#define NAME "NVIDIA Fake"
#define LEAST_W 200
static int fault(void) { return number("lost") ? GPU_IS_LOST : 0; }
static int num_devices(void) { return (int)number("gpus"); }
static double limit_of(int g) { return settable()->limit_w[g] ? settable()->limit_w[g] : number("limit_w"); }
static double clock_of(int g, double t) {
    (void)t;
    double locked_mhz = settable()->locked_mhz[g];
    return locked_mhz && locked_mhz < number("sm_mhz") ? locked_mhz : number("sm_mhz");
}
static unsigned long long reasons_of(int g, double t) {
    (void)g, (void)t;
    return (unsigned long long)number("reasons");
}
#endif

static int index_of(device_t d) {
    long i = (char *)d - devices;
    return d && i >= 0 && i < num_devices() ? (int)i : -1;
}

/* Every call on a device starts so: g is its index, t the time. */
#define ENTER(d) \
    if (!fake_open_count) return UNINITIALIZED; \
    int g = index_of(d); \
    if (g < 0) return INVALID; \
    double t = now_s(); \
    (void)t; \
    if (fault()) return fault()
#define FAIL(name) do { if (number(name)) return (int)number(name); } while (0)

static unsigned milli(double w) { return (unsigned)llround(w * 1e3); }

static unsigned long long counter_mj(int g, double t) {
    double mj = number("counter_offset_mj") + floor(counted_j(g, t) * 1e3 + 1e-6);
    if (number("counter_width") > 0) mj = fmod(mj, number("counter_width"));
    return (unsigned long long)mj;
}

static void uuid_of(int g, char *text, unsigned length) {
    snprintf(text, length, "GPU-%08x-0000-4000-8000-%012x", 0xfa0e0000u + (unsigned)g, (unsigned)g);
}

API int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    FAIL("init_rc");
    fake_open_count++;
    return SUCCESS;
}
API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlInit(void) { return nvmlInitWithFlags(0); } /* torch asks for this one */
API int nvmlShutdown(void) {
    if (!fake_open_count) return UNINITIALIZED;
    fake_open_count--;
    return SUCCESS;
}
API const char *nvmlErrorString(int rc) {
    return rc == GPU_IS_LOST ? "GPU is lost" : rc == NOT_SUPPORTED ? "Not Supported" : "fake error";
}
API int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "000.00"); return SUCCESS; }

API int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)num_devices(); return SUCCESS; }
API int nvmlDeviceGetHandleByIndex_v2(unsigned i, device_t *d) {
    if (i >= (unsigned)num_devices()) return INVALID;
    *d = (device_t)&devices[i];
    return SUCCESS;
}
API int nvmlDeviceGetHandleByUUID(const char *uuid, device_t *d) {
    char text[96];
    for (int g = 0; g < num_devices(); g++) {
        uuid_of(g, text, sizeof text);
        /* The instances of a GPU in MIG mode have UUIDs of their own; one each is enough here. */
        if (!strcmp(uuid, text) || (number("mig") && !strncmp(uuid, "MIG-", 4) && !strcmp(uuid + 4, text + 4))) {
            *d = (device_t)&devices[g];
            return SUCCESS;
        }
    }
    return NOT_FOUND;
}
API int nvmlDeviceGetHandleByPciBusId_v2(const char *address, device_t *d) {
    unsigned domain, bus, slot;
    if (sscanf(address, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID;
    int g = (int)bus - 0x10;
    if (domain || slot || g < 0 || g >= num_devices()) return NOT_FOUND;
    *d = (device_t)&devices[g];
    return SUCCESS;
}
API int nvmlDeviceGetUUID(device_t d, char *text, unsigned length) { ENTER(d); uuid_of(g, text, length); return SUCCESS; }
API int nvmlDeviceGetName(device_t d, char *text, unsigned length) {
    ENTER(d);
    snprintf(text, length, NAME " %d", g);
    return SUCCESS;
}
API int nvmlDeviceGetArchitecture(device_t d, unsigned *a) { ENTER(d); *a = (unsigned)number("architecture"); return SUCCESS; }
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char address[32]; } pci_t;
API int nvmlDeviceGetPciInfo_v3(device_t d, pci_t *p) {
    ENTER(d);
    memset(p, 0, sizeof *p);
    p->bus = 0x10 + (unsigned)g;
    p->id = (unsigned)number("pci_device_id") << 16 | 0x10de;
    snprintf(p->address, sizeof p->address, "00000000:%02X:00.0", p->bus);
    return SUCCESS;
}
/* NVLink connects GPUs whose numbers differ in the lowest "nvlink" bits alone, as bridges of 2 or 4 do. */
API int nvmlDeviceGetP2PStatus(device_t d, device_t other, int capability, int *status) {
    ENTER(d);
    FAIL("p2p_rc");
    int o = index_of(other);
    if (o < 0 || o == g) return INVALID;
    int bits = (int)number("nvlink");
    *status = capability == 2 && (g >> bits) == (o >> bits) ? 0 : 3;
    return SUCCESS;
}
API int nvmlDeviceGetMigMode(device_t d, unsigned *current, unsigned *pending) {
    ENTER(d);
    *current = *pending = (unsigned)number("mig");
    return SUCCESS;
}

API int nvmlDeviceGetPowerUsage(device_t d, unsigned *mw) {
    ENTER(d);
    FAIL("usage_rc");
    int averages = number("architecture") >= 7 && ((int)number("pci_device_id") >> 8) != 0x20;
    *mw = milli(averages ? average_w(g, t) : sensed_w(g, t));
    return SUCCESS;
}
API int nvmlDeviceGetTotalEnergyConsumption(device_t d, unsigned long long *mj) {
    ENTER(d);
    FAIL("energy_rc");
    *mj = counter_mj(g, t);
    return SUCCESS;
}
API int nvmlDeviceGetEnforcedPowerLimit(device_t d, unsigned *mw) {
    ENTER(d);
    FAIL("limit_rc");
    *mw = milli(limit_of(g));
    return SUCCESS;
}
API int nvmlDeviceGetPowerManagementDefaultLimit(device_t d, unsigned *mw) {
    ENTER(d);
    FAIL("limit_rc");
    *mw = milli(number("default_w"));
    return SUCCESS;
}
API int nvmlDeviceGetClockInfo(device_t d, unsigned kind, unsigned *mhz) {
    ENTER(d);
    if (unreadable()) return 999;
    FAIL("clock_rc");
    *mhz = (unsigned)(kind == 1 ? clock_of(g, t) : kind == 2 ? number("memory_mhz") : 0);
    return SUCCESS;
}
API int nvmlDeviceGetCurrentClocksThrottleReasons(device_t d, unsigned long long *bits) {
    ENTER(d);
    FAIL("reasons_rc");
    *bits = reasons_of(g, t);
    return SUCCESS;
}
API int nvmlDeviceGetTemperature(device_t d, unsigned sensor, unsigned *c) {
    ENTER(d);
    (void)sensor;
    FAIL("temperature_rc");
    *c = (unsigned)number("temperature_c");
    return SUCCESS;
}
API int nvmlDeviceGetC2cModeInfoV(device_t d, void *info) { (void)d; (void)info; return NOT_SUPPORTED; }
API int nvmlDeviceGetPowerManagementLimitConstraints(device_t d, unsigned *low, unsigned *high) {
    ENTER(d);
    *low = milli(LEAST_W);
    *high = milli(number("default_w"));
    return SUCCESS;
}

API int nvmlDeviceGetPowerManagementLimit(device_t d, unsigned *mw) {
    ENTER(d);
    if (unreadable()) return 999;
    FAIL("limit_rc");
    *mw = milli(limit_of(g));
    return SUCCESS;
}
API int nvmlDeviceSetPowerManagementLimit(device_t d, unsigned mw) {
    ENTER(d);
    return put(&settable()->limit_w[g], mw / 1e3);
}
API int nvmlDeviceSetGpuLockedClocks(device_t d, unsigned low, unsigned high) {
    ENTER(d);
    (void)low;
    return put(&settable()->locked_mhz[g], high);
}
API int nvmlDeviceResetGpuLockedClocks(device_t d) {
    ENTER(d);
    return put(&settable()->locked_mhz[g], 0);
}
static int listed(unsigned *count, unsigned *values, unsigned from, unsigned to, unsigned step) {
    unsigned needed = (to - from) / step + 1;
    int fits = *count >= needed;
    *count = needed;
    if (!fits) return 7;
    for (unsigned i = 0; i < needed; i++) values[i] = from + i * step;
    return SUCCESS;
}
API int nvmlDeviceGetSupportedMemoryClocks(device_t d, unsigned *count, unsigned *mhz) {
    ENTER(d);
    return listed(count, mhz, 3201, 3201, 1);
}
API int nvmlDeviceGetSupportedGraphicsClocks(device_t d, unsigned memory, unsigned *count, unsigned *mhz) {
    ENTER(d);
    if (memory != 3201) return INVALID;
    return listed(count, mhz, 210, 1980, 15);
}

/* Whoever calls one of these changes a device. */
#define WRITER(name) API int name(void) { fake_write_count++; return SUCCESS; }
WRITER(nvmlDeviceSetPowerManagementLimit_v2)
WRITER(nvmlDeviceSetMemoryLockedClocks)
WRITER(nvmlDeviceSetApplicationsClocks)
WRITER(nvmlDeviceSetPersistenceMode)
WRITER(nvmlDeviceSetMigMode)
WRITER(nvmlGpmSetStreamingEnabled)
WRITER(nvmlDeviceClearFieldValues)

#ifdef SIMULATED_GPU
/* DeepSpeed asks for memory. What is used of it here nobody tells: none. */
typedef struct { unsigned long long total, free, used; } memory_t;
API int nvmlDeviceGetMemoryInfo(device_t d, memory_t *m) {
    ENTER(d);
    *m = (memory_t){ simulated_memory_bytes(), simulated_memory_bytes(), 0 };
    return SUCCESS;
}
/* torch asks when memory runs out. */
API int nvmlDeviceGetComputeRunningProcesses(device_t d, unsigned *count, void *found) {
    ENTER(d);
    (void)found;
    *count = 0;
    return SUCCESS;
}
#endif
/* Slow on real drivers: never to be called. */
WRITER(nvmlDeviceGetComputeRunningProcesses_v3)

#ifndef OLD_DRIVER
API int nvmlDeviceGetCurrentClocksEventReasons(device_t d, unsigned long long *bits) {
    return nvmlDeviceGetCurrentClocksThrottleReasons(d, bits);
}
typedef struct { unsigned version; int sensor, temperature; } temperature_t;
API int nvmlDeviceGetTemperatureV(device_t d, temperature_t *p) {
    ENTER(d);
    if (p->version != 0x100000C) return MISMATCH;
    FAIL("temperature_v_rc");
    FAIL("temperature_rc");
    p->temperature = (int)number("temperature_c");
    return SUCCESS;
}

typedef union { double d; unsigned ui; unsigned long ul; unsigned long long ull; long long sll; int si; } value_t;
typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type; int rc; value_t value; } field_t;
API int nvmlDeviceGetFieldValues(device_t d, int count, field_t *fields) {
    ENTER(d);
    FAIL("fields_rc");
    for (field_t *f = fields; f < fields + count; f++) {
        f->type = 1;
        f->value.ull = 0;
        f->rc = f->scope ? NOT_SUPPORTED : SUCCESS;
        if (f->field == 83) {
            f->type = 3;
            f->value.ull = counter_mj(g, t);
            if (number("field_energy_rc")) f->rc = (int)number("field_energy_rc");
        } else if (f->field == 185) {
            f->value.ui = milli(average_w(g, t));
            if (number("average_rc")) f->rc = (int)number("average_rc");
        } else if (f->field == 186) {
            f->type = (unsigned)number("instant_type");
            f->value.ui = milli(sensed_w(g, t));
            if (number("instant_rc")) f->rc = (int)number("instant_rc");
        } else f->rc = NOT_SUPPORTED;
        if (f->rc) f->value.ull = 0xdeadbeef; /* to be seen where a return code is not looked at */
    }
    return SUCCESS;
}

static long gpm_samples;
typedef struct { double t, memory_s, sm_s; } sample_t;
typedef struct { unsigned metric; int rc; double value; char *names[3]; } metric_t;
typedef struct { unsigned version, count; sample_t *first, *second; metric_t metrics[]; } metrics_t;
API int nvmlGpmQueryDeviceSupport(device_t d, unsigned *support) {
    ENTER(d);
    if (support[0] != 1) return MISMATCH;
    support[1] = (unsigned)number("gpm");
    return SUCCESS;
}
API int nvmlGpmSampleAlloc(sample_t **s) { *s = calloc(1, sizeof **s); gpm_samples++; return SUCCESS; }
API int nvmlGpmSampleFree(sample_t *s) { free(s); gpm_samples--; return SUCCESS; }
API long fake_gpm_samples(void) { return gpm_samples; }
API int nvmlGpmSampleGet(device_t d, sample_t *s) {
    ENTER(d);
    FAIL("gpm_rc");
    s->t = t;
#ifdef SIMULATED_GPU
    simulated_parts(g, t + loaded_s, &s->memory_s, &s->sm_s);
#endif
    return SUCCESS;
}
API int nvmlGpmMetricsGet(metrics_t *q) {
    if (q->version != 1) return MISMATCH;
    if (q->second->t <= q->first->t) return INVALID; /* samples in the wrong order, or one and the same */
    for (metric_t *m = q->metrics; m < q->metrics + q->count; m++) {
        m->rc = SUCCESS;
#ifdef SIMULATED_GPU
        double passed_s = q->second->t - q->first->t;
        if (m->metric == 2) m->value = 100 * (q->second->sm_s - q->first->sm_s) / passed_s;
        else if (m->metric == 10) m->value = 100 * (q->second->memory_s - q->first->memory_s) / passed_s;
        else m->rc = NOT_SUPPORTED;
        continue;
#endif
        switch (m->metric) {
        case 2: m->value = number("gpm_sm"); break;
        case 3: m->value = number("gpm_occupancy"); break;
        case 5: m->value = number("gpm_tensor"); m->rc = (int)number("gpm_tensor_rc"); break;
        case 10: m->value = number("gpm_dram"); break;
        case 60: m->value = number("gpm_rx"); break;
        case 61: m->value = number("gpm_tx"); break;
        default: m->rc = NOT_SUPPORTED;
        }
    }
    return SUCCESS;
}
#endif
