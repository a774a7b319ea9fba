/*
 * Stand-in for libnvidia-ml.so.1. It shares no code with the exporter and is written from NVIDIA's nvml.h (12.9).
 *
 * nvidia-ml-py loads it through the loader (LD_LIBRARY_PATH), as it loads NVIDIA's library. The directory FAKE_NVML_DIR
 * holds five text files, which are read again when they change. Times are Unix seconds, GPUs are indices.
 *
 *   schedule  GPU TIME WATTS UTIL% MEMUTIL% SM% TENSOR% DRAM% RX_MIB/S TX_MIB/S POWER_CAP_RATIO HW_THERMAL_RATIO
 *             The load of a GPU from TIME until the next line of this GPU.
 *   state     driver VERSION | gpus COUNT | costs 1 | energy_from GPU MILLIJOULES | reload GPU TIME | mem_used GPU BYTES
 *             | ecc_unc GPU N | ecc_cor GPU N | replays GPU N | remap_pending GPU N | recovery GPU N
 *             One setting per line. `costs 1` makes each call burn the CPU time that the call takes on an H100.
 *             At the time of `reload`, the energy counter starts at 0 again.
 *   errors    FUNCTION|* GPU|-1 CODE FROM TO [HANG_SECONDS] [GARBAGE]
 *             From FROM to TO, the function returns CODE, waits, or returns impossible values (GARBAGE 1)
 *             or a third of the energy (GARBAGE 2).
 *             `*` is every function that reads a GPU, or every function if CODE is GPU_IS_LOST. -1 is all GPUs.
 *   procs     PID GPU BYTES SM%
 *   xids      TIME GPU XID
 */
#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "nvml.h"
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 8
#define LOAD_VALUES 10 // of a line of `schedule`, in its order
enum { WATTS, UTIL, MEMUTIL, SM, TENSOR, DRAM, RX, TX, POWER_CAP, HW_THERMAL };
typedef struct { // constant load from time t on: the values, and their integrals over the time before t
    double t, v[LOAD_VALUES], cum[LOAD_VALUES];
} Segment;
typedef struct nvmlDevice_st { // GPU of index i with n segments in the order of time
    int i;
    Segment *s;
    int n;
} Gpu;
static Gpu gpus[MAX_GPUS];
static int gpu_count = 2, costs = 0;
static char driver[80] = "580.159.04";
static double reload_at[MAX_GPUS];   // the energy counter starts at 0 again
static double energy_from[MAX_GPUS]; // millijoules
static double mem_used[MAX_GPUS];
static double mem_total = 85520809984.0;
static int ecc_unc[MAX_GPUS], ecc_cor[MAX_GPUS], replays[MAX_GPUS], remap_pending[MAX_GPUS], recovery[MAX_GPUS];
typedef struct { // line of `errors`
    char f[64];
    int gpu, code;
    double from, to, hang;
    int garbage;
} Fault;
static Fault faults[64];
static int fault_count;
typedef struct { // line of `procs`
    unsigned pid;
    int gpu;
    double mem, sm;
} Process;
static Process processes[64];
static int process_count;
typedef struct { // line of `xids`
    double t;
    int gpu;
    unsigned long long xid;
} Xid;
static Xid xids[256];
static int xid_count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct timespec modified_times[5]; // of the five files, as last read

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}
static void burn_cpu(double ms) {
    if (!costs)
        return;
    double e = cpu_seconds() + ms * 1e-3;
    while (cpu_seconds() < e)
        ;
}
// Open file number k of the directory if it has changed since it was last read.
static FILE *open_if_changed(const char *name, int k) {
    const char *d = getenv("FAKE_NVML_DIR");
    char p[512];
    snprintf(p, sizeof p, "%s/%s", d ? d : ".", name);
    struct stat st;
    if (stat(p, &st))
        return NULL;
    if (st.st_mtim.tv_sec == modified_times[k].tv_sec && st.st_mtim.tv_nsec == modified_times[k].tv_nsec)
        return NULL;
    modified_times[k] = st.st_mtim;
    return fopen(p, "r");
}
static void load_files(void) {
    FILE *f;
    char line[512];
    if ((f = open_if_changed("schedule", 0))) {
        for (int g = 0; g < MAX_GPUS; g++) {
            gpus[g].i = g;
            gpus[g].n = 0;
        }
        while (fgets(line, sizeof line, f)) {
            int g;
            Segment s;
            memset(&s, 0, sizeof s);
            int k = sscanf(line, "%d %lf %lf %lf %lf %lf %lf %lf %lf %lf %lf %lf", &g, &s.t, &s.v[0], &s.v[1],
                           &s.v[2], &s.v[3], &s.v[4], &s.v[5], &s.v[6], &s.v[7], &s.v[8], &s.v[9]);
            if (k < 3 || g < 0 || g >= MAX_GPUS)
                continue;
            Gpu *d = &gpus[g];
            d->s = realloc(d->s, sizeof(Segment) * (d->n + 1));
            if (d->n) {
                Segment *p = &d->s[d->n - 1];
                for (int j = 0; j < LOAD_VALUES; j++)
                    s.cum[j] = p->cum[j] + p->v[j] * (s.t - p->t);
            }
            d->s[d->n++] = s;
        }
        fclose(f);
    }
    if ((f = open_if_changed("state", 1))) {
        char k[64], v[64];
        int g;
        while (fgets(line, sizeof line, f)) {
            if (sscanf(line, "%63s %63s", k, v) < 2)
                continue;
            double x = 0;
            sscanf(line, "%*s %d %lf", &g, &x);
            if (!strcmp(k, "driver"))
                strcpy(driver, v);
            else if (!strcmp(k, "gpus"))
                gpu_count = atoi(v);
            else if (!strcmp(k, "costs"))
                costs = atoi(v);
            else if (!strcmp(k, "reload"))
                reload_at[g] = x;
            else if (!strcmp(k, "energy_from"))
                energy_from[g] = x;
            else if (!strcmp(k, "mem_used"))
                mem_used[g] = x;
            else if (!strcmp(k, "ecc_unc"))
                ecc_unc[g] = x;
            else if (!strcmp(k, "ecc_cor"))
                ecc_cor[g] = x;
            else if (!strcmp(k, "replays"))
                replays[g] = x;
            else if (!strcmp(k, "remap_pending"))
                remap_pending[g] = x;
            else if (!strcmp(k, "recovery"))
                recovery[g] = x;
        }
        fclose(f);
    }
    if ((f = open_if_changed("errors", 2))) {
        fault_count = 0;
        while (fgets(line, sizeof line, f) && fault_count < 64) {
            Fault *e = &faults[fault_count];
            memset(e, 0, sizeof *e);
            e->to = 1e18;
            if (sscanf(line, "%63s %d %d %lf %lf %lf %d", e->f, &e->gpu, &e->code, &e->from, &e->to, &e->hang,
                       &e->garbage) >= 3)
                fault_count++;
        }
        fclose(f);
    }
    if ((f = open_if_changed("procs", 3))) {
        process_count = 0;
        while (fgets(line, sizeof line, f) && process_count < 64) {
            Process *p = &processes[process_count];
            p->sm = 0;
            if (sscanf(line, "%u %d %lf %lf", &p->pid, &p->gpu, &p->mem, &p->sm) >= 3)
                process_count++;
        }
        fclose(f);
    }
    if ((f = open_if_changed("xids", 4))) {
        xid_count = 0;
        while (fgets(line, sizeof line, f) && xid_count < 256) {
            Xid *x = &xids[xid_count];
            if (sscanf(line, "%lf %d %llu", &x->t, &x->gpu, &x->xid) >= 3)
                xid_count++;
        }
        fclose(f);
    }
}
// Return the index of the segment at a time, or -1 before the first.
static int segment_at(Gpu *d, double t) {
    int lo = 0, hi = d->n - 1;
    if (d->n == 0 || t < d->s[0].t)
        return -1;
    while (lo < hi) {
        int m = (lo + hi + 1) / 2;
        if (d->s[m].t <= t)
            lo = m;
        else
            hi = m - 1;
    }
    return lo;
}
static double value_at(Gpu *d, int j, double t) {
    int k = segment_at(d, t);
    return k < 0 ? 0 : d->s[k].v[j];
}
// Return the integral of load value j from the first segment to a time.
static double integral_until(Gpu *d, int j, double t) {
    int k = segment_at(d, t);
    return k < 0 ? 0 : d->s[k].cum[j] + d->s[k].v[j] * (t - d->s[k].t);
}
static double mean_between(Gpu *d, int j, double a, double b) {
    return (integral_until(d, j, b) - integral_until(d, j, a)) / (b - a);
}

static int garbage; // GARBAGE of the current call; enter_call() sets it
// Read changed files, wait and burn CPU time as configured, and return the code of a matching line of `errors`.
static nvmlReturn_t enter_call(const char *f, Gpu *d, double ms) {
    pthread_mutex_lock(&mutex);
    load_files();
    double t = now(), hang = 0;
    int code = 0;
    garbage = 0;
    for (int k = 0; k < fault_count; k++) {
        Fault *e = &faults[k];
        if (t < e->from || t >= e->to)
            continue;
        if (d ? (e->gpu >= 0 && e->gpu != d->i) : (e->gpu >= 0))
            continue;
        if (strcmp(e->f, "*") && strcmp(e->f, f))
            continue;
        if (!strcmp(e->f, "*") &&
            (!strncmp(f, "nvmlInit", 8) || !strncmp(f, "nvmlShutdown", 12) || !strncmp(f, "nvmlSystem", 10) ||
             !strncmp(f, "nvmlDeviceGetCount", 18) || !strncmp(f, "nvmlDeviceGetHandle", 19) ||
             !strncmp(f, "nvmlDeviceGetUUID", 17) || !strncmp(f, "nvmlEvent", 9) ||
             !strcmp(f, "nvmlErrorString")) &&
            e->code != NVML_ERROR_GPU_IS_LOST)
            continue;
        if (e->code)
            code = e->code;
        if (e->hang)
            hang = e->hang;
        if (e->garbage)
            garbage = e->garbage;
    }
    pthread_mutex_unlock(&mutex);
    if (hang)
        usleep(hang * 1e6);
    burn_cpu(ms);
    return code;
}
#define ENTER(d, ms)                                                                                             \
    do {                                                                                                     \
        nvmlReturn_t r_ = enter_call(__func__, (Gpu *)(d), ms);                                                   \
        if (r_)                                                                                              \
            return r_;                                                                                       \
    } while (0)
#define API __attribute__((visibility("default")))

API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    ENTER(NULL, 0);
    return 0;
}
API nvmlReturn_t nvmlInit_v2(void) {
    ENTER(NULL, 0);
    return 0;
}
API nvmlReturn_t nvmlShutdown(void) {
    return 0;
}
API const char *nvmlErrorString(nvmlReturn_t r) {
    static __thread char b[64];
    snprintf(b, 64, "fake error %d", r);
    return b;
}
API nvmlReturn_t nvmlSystemGetDriverVersion(char *v, unsigned n) {
    ENTER(NULL, 0);
    snprintf(v, n, "%s", driver);
    return 0;
}
API nvmlReturn_t nvmlSystemGetNVMLVersion(char *v, unsigned n) {
    ENTER(NULL, 0);
    snprintf(v, n, "13.%s", driver);
    return 0;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *v) {
    ENTER(NULL, 0);
    *v = 13000;
    return 0;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *v) {
    ENTER(NULL, 0);
    *v = 13000;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *c) {
    ENTER(NULL, 0);
    *c = gpu_count;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned i, nvmlDevice_t *d) {
    ENTER(i < MAX_GPUS ? &gpus[i] : NULL, 0);
    if ((int)i >= gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    gpus[i].i = i;
    *d = (nvmlDevice_t)&gpus[i];
    return 0;
}
API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *u, unsigned n) {
    ENTER(d, 0);
    snprintf(u, n, "GPU-0000000%d-fa4e-4e47-8888-123456789abc", ((Gpu *)d)->i);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *u, unsigned n) {
    ENTER(d, 0);
    snprintf(u, n, "NVIDIA H100 80GB HBM3");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t d, char *u, unsigned n) {
    ENTER(d, 0);
    snprintf(u, n, "165422300000%d", ((Gpu *)d)->i);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t d, char *u, unsigned n) {
    ENTER(d, 0);
    snprintf(u, n, "96.00.5E.00.01");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t d, char *u, unsigned n) {
    ENTER(d, 0);
    snprintf(u, n, "692-2G520-0200-000");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned *m) {
    ENTER(d, 0);
    *m = ((Gpu *)d)->i;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned *m) {
    ENTER(d, 0);
    *m = ((Gpu *)d)->i;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t d, nvmlDeviceArchitecture_t *a) {
    ENTER(d, 0);
    *a = NVML_DEVICE_ARCH_HOPPER;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *a, int *b) {
    ENTER(d, 0);
    *a = 9;
    *b = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *p) {
    ENTER(d, 0);
    memset(p, 0, sizeof *p);
    p->bus = 0x18 + ((Gpu *)d)->i;
    snprintf(p->busId, sizeof p->busId, "00000000:%02X:00.0", p->bus);
    snprintf(p->busIdLegacy, sizeof p->busIdLegacy, "0000:%02X:00.0", p->bus);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t h, nvmlUtilization_t *u) {
    ENTER(h, .04);
    Gpu *d = (Gpu *)h;
    double t = floor(now() * 5) / 5;
    if (garbage) {
        u->gpu = 0xffffffffu;
        u->memory = 4000000;
        return 0;
    }
    u->gpu = lround(mean_between(d, UTIL, t - .2, t));
    u->memory = lround(mean_between(d, MEMUTIL, t - .2, t));
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t h, nvmlMemory_t *m) {
    ENTER(h, .04);
    Gpu *d = (Gpu *)h;
    m->total = mem_total;
    m->used = mem_used[d->i] + 503316480;
    m->free = m->total - m->used;
    if (garbage)
        m->used = ~0ull;
    return 0;
}
#ifndef OLD
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t h, nvmlMemory_v2_t *m) {
    ENTER(h, .04);
    Gpu *d = (Gpu *)h;
    if (m->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    m->total = mem_total;
    m->reserved = 503316480;
    m->used = mem_used[d->i];
    m->free = m->total - m->used - m->reserved;
    if (garbage)
        m->used = ~0ull;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t h, nvmlTemperature_t *t) {
    ENTER(h, .03);
    t->temperature = garbage ? -1 : 50;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t h, nvmlMarginTemperature_t *t) {
    ENTER(h, .03);
    t->marginTemperature = 37;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t h, unsigned *n) {
    ENTER(h, 0);
    *n = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t h, nvmlEccSramErrorStatus_t *s) {
    ENTER(h, .05);
    s->bThresholdExceeded = 0;
    return 0;
}
#endif
API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t h, nvmlTemperatureSensors_t s, unsigned *t) {
    ENTER(h, .03);
    *t = 50;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t h, nvmlTemperatureThresholds_t s,
                                                   unsigned *t) {
    ENTER(h, .03);
    if (s == 0)
        *t = 95;
    else if (s == 1)
        *t = 89;
    else
        return NVML_ERROR_NOT_SUPPORTED;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t h, nvmlClockType_t c, unsigned *v) {
    ENTER(h, .04);
    *v = c == 2 ? 2619 : c == 1 ? (value_at((Gpu *)h, UTIL, now()) > 0 ? 1980 : 345) : 1545;
    if (garbage)
        *v = 0xffffffff;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    double t = floor(now() * 10) / 10;
    *p = lround(1000 * mean_between((Gpu *)h, WATTS, t - 1, t));
    if (garbage)
        *p = 0xfffffffe;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 700000;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 700000;
    return 0;
}
static unsigned long long energy(Gpu *d) {
    double t = floor(now() * 10) / 10;
    double e = energy_from[d->i] + 1000 * integral_until(d, WATTS, t);
    if (reload_at[d->i] > 0 && t >= reload_at[d->i])
        e = 1000 * (integral_until(d, WATTS, t) - integral_until(d, WATTS, reload_at[d->i]));
    return (unsigned long long)e;
}
API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t h, unsigned long long *e) {
    ENTER(h, 4.5);
    *e = energy((Gpu *)h);
    if (garbage == 1)
        *e = ~0ull;
    if (garbage == 2)
        *e /= 3;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 5;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 5;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 16;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = 16;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t h, unsigned *p) {
    ENTER(h, .05);
    *p = replays[((Gpu *)h)->i];
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t h, nvmlPcieUtilCounter_t c, unsigned *p) {
    ENTER(h, 20);
    *p = value_at((Gpu *)h, c ? RX : TX, now()) * 1024;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t h, nvmlMemoryErrorType_t e,
                                                 nvmlEccCounterType_t s, nvmlMemoryLocation_t l,
                                                 unsigned long long *c) {
    ENTER(h, .05);
    Gpu *d = (Gpu *)h;
    if (l != NVML_MEMORY_LOCATION_DRAM && l != NVML_MEMORY_LOCATION_SRAM &&
        l != NVML_MEMORY_LOCATION_DEVICE_MEMORY)
        return NVML_ERROR_NOT_SUPPORTED;
    *c = l == NVML_MEMORY_LOCATION_SRAM ? 0 : (e ? ecc_unc : ecc_cor)[d->i];
    return 0;
}
API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t h, unsigned *a, unsigned *b, unsigned *c,
                                           unsigned *f) {
    ENTER(h, .05);
    *a = 0;
    *b = remap_pending[((Gpu *)h)->i];
    *c = remap_pending[((Gpu *)h)->i];
    *f = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t h, unsigned l, nvmlEnableState_t *s) {
    ENTER(h, .01);
    return NVML_ERROR_NOT_SUPPORTED;
}
API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t h, unsigned *a, unsigned *b) {
    ENTER(h, .01);
    *a = *b = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t h, unsigned *a) {
    ENTER(h, .01);
    *a = 7;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t h, unsigned i, nvmlDevice_t *m) {
    ENTER(h, .01);
    return NVML_ERROR_NOT_FOUND;
}
static nvmlReturn_t list_processes(nvmlDevice_t h, unsigned *n, void *out) {
    Gpu *d = (Gpu *)h;
    unsigned c = 0;
    for (int k = 0; k < process_count; k++)
        c += processes[k].gpu == d->i;
    if (*n < c || (!out && c)) {
        *n = c;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    *n = c;
    c = 0;
    for (int k = 0; k < process_count; k++)
        if (processes[k].gpu == d->i) {
            nvmlProcessInfo_v2_t *p = (nvmlProcessInfo_v2_t *)out + c++;
            p->pid = processes[k].pid;
            p->usedGpuMemory = processes[k].mem < 0 ? ~0ull : (unsigned long long)processes[k].mem;
            p->gpuInstanceId = p->computeInstanceId = 0xffffffff;
            if (garbage)
                p->pid = 0x7fffffff;
        }
    return 0;
}
#ifndef OLD
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t h, unsigned *n, nvmlProcessInfo_t *o) {
    ENTER(h, .1);
    return list_processes(h, n, o);
}
#endif
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t h, unsigned *n,
                                                         nvmlProcessInfo_v2_t *o) {
    ENTER(h, .1);
    return list_processes(h, n, o);
}
API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t h, nvmlProcessUtilizationSample_t *o,
                                                 unsigned *n, unsigned long long last) {
    ENTER(h, .2);
    Gpu *d = (Gpu *)h;
    unsigned c = 0;
    unsigned long long t = (unsigned long long)(floor(now() * 2) / 2 * 1e6);
    for (int k = 0; k < process_count; k++)
        c += processes[k].gpu == d->i;
    if (!o || *n < c) {
        *n = c;
        return c ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_ERROR_NOT_FOUND;
    }
    if (t <= last || !c)
        return NVML_ERROR_NOT_FOUND;
    c = 0;
    for (int k = 0; k < process_count; k++)
        if (processes[k].gpu == d->i) {
            memset(&o[c], 0, sizeof *o);
            o[c].pid = processes[k].pid;
            o[c].timeStamp = t;
            o[c].smUtil = processes[k].sm;
            c++;
        }
    *n = c;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t h, nvmlSamplingType_t ty, unsigned long long last,
                                      nvmlValueType_t *vt, unsigned *n, nvmlSample_t *o) {
    if (ty != 0 && ty != 1)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t r = enter_call(__func__, (Gpu *)h, o ? (ty ? 1.75 : .5) : 0);
    if (r)
        return r;
    Gpu *d = (Gpu *)h;
    double step = ty ? .2 : .02; // seconds between two samples of the ring buffer
    int depth = ty ? 70 : 119;   // samples in the ring buffer
    *vt = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (!o) {
        *n = depth + 1;
        return 0;
    }
    long long kend = (long long)floor(now() / step);
    unsigned c = 0;
    for (long long k = kend - depth + 1; k <= kend && c < *n; k++) {
        double jitter = ((k * 2654435761u) % 1000) / 1000. * (ty ? .002 : .0008);
        double t = k * step + jitter;
        if (t > now())
            break;
        unsigned long long us = (unsigned long long)llround(t * 1e6);
        if (us <= last)
            continue;
        double previous_jitter = (((k - 1) * 2654435761u) % 1000) / 1000. * (ty ? .002 : .0008);
        double m = mean_between(d, ty ? UTIL : WATTS, (k - 1) * step + previous_jitter, t);
        o[c].timeStamp = us;
        memset(&o[c].sampleValue, 0, 8);
        o[c].sampleValue.uiVal = garbage ? 0xffffffffu : (unsigned)lround(ty ? m : m * 1000);
        c++;
    }
    *n = c;
    return c ? 0 : NVML_ERROR_NOT_FOUND;
}
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t h, int n, nvmlFieldValue_t *f) {
    ENTER(h, .03);
    Gpu *d = (Gpu *)h;
    double t = now();
    int v1 = 0, v2 = 0;
    sscanf(driver, "%d.%d", &v1, &v2);
    // The ids of the throttling counters depend on the version of the driver.
    int has_first_ids = v1 >= 575 && !(v1 > 580 || (v1 == 580 && v2 > 65));
    int has_moved_ids = v1 > 580 || (v1 == 580 && v2 >= 82);
    for (int k = 0; k < n; k++) {
        nvmlFieldValue_t *x = &f[k];
        x->nvmlReturn = 0;
        x->timestamp = t * 1e6;
        x->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        x->value.ullVal = 0;
        unsigned id = x->fieldId;
        int g = garbage;
        if (id >= 74 && id <= 79) {
            x->value.ullVal = id == 74   ? 1e9 * integral_until(d, POWER_CAP, t)
                              : id == 75 ? 1e9 * integral_until(d, HW_THERMAL, t)
                              : id == 78 ? 1e9 * (t - 1.79e9)
                                         : 0;
            if (g)
                x->value.ullVal = ~0ull;
        } else if (id == 82) {
            x->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            x->value.uiVal = 52;
        } else if (id == 83) {
            burn_cpu(4.5);
            x->value.ullVal = energy(d);
        } else if (id == 173 || id == 179 || id == 180) {
            x->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            x->value.uiVal = 0;
        } else if (id == 185 || id == 186) {
            burn_cpu(.1);
            x->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            double q = floor(t * 10) / 10;
            x->value.uiVal = 1000 * (id == 186 ? mean_between(d, WATTS, q - .1, q) : mean_between(d, WATTS, q - 1, q));
        } else if (id == 197 || id == 198) {
            burn_cpu(.23);
            x->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            x->value.uiVal =
                (unsigned)((unsigned long long)(integral_until(d, id == 198 ? RX : TX, t) * 1048576.) & 0xffffffffull);
        } else if (id == 230 && v1 >= 565) {
            x->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
            x->value.uiVal = recovery[d->i];
        } else if ((has_first_ids && id >= 251 && id <= 253) || (has_moved_ids && id >= 269 && id <= 271)) {
            int w = has_first_ids ? id - 251 : id - 269;
            x->value.ullVal = w == 1 ? 1e9 * integral_until(d, HW_THERMAL, t) : 0;
        } else if (id >= 251 && id <= 253) {
            x->valueType = NVML_VALUE_TYPE_DOUBLE;
            x->value.dVal = 123456.;
        } else
            x->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t h, unsigned long long *e) {
    ENTER(h, 0);
    *e = 0xff9f;
    return 0;
}
typedef struct { // events of the GPUs in the mask since its creation
    unsigned mask;
    double from;
} EventSet;
API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *s) {
    ENTER(NULL, 0);
    EventSet *x = calloc(1, sizeof *x);
    x->from = now();
    *s = (nvmlEventSet_t)x;
    return 0;
}
API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t s) {
    return 0;
}
API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t h, unsigned long long e, nvmlEventSet_t s) {
    ENTER(h, 0);
    ((EventSet *)s)->mask |= 1u << ((Gpu *)h)->i;
    return 0;
}
static double delivered[256];
API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t s, nvmlEventData_t *o, unsigned ms) {
    EventSet *x = (EventSet *)s;
    double end = now() + ms / 1e3;
    for (;;) {
        ENTER(NULL, 0);
        double t = now();
        for (int k = 0; k < xid_count; k++)
            if (xids[k].t <= t && xids[k].t >= x->from && delivered[k] != xids[k].t &&
                (x->mask >> xids[k].gpu & 1)) {
                delivered[k] = xids[k].t;
                memset(o, 0, sizeof *o);
                o->device = (nvmlDevice_t)&gpus[xids[k].gpu];
                o->eventType = 8;
                o->eventData = xids[k].xid;
                return 0;
            }
        if (t >= end)
            return NVML_ERROR_TIMEOUT;
        usleep(50000);
    }
}
API nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t h, unsigned long long *r) {
    ENTER(h, .05);
    *r = value_at((Gpu *)h, POWER_CAP, now()) > 0 ? 4 : 1;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t h, nvmlPerfPolicyType_t p,
                                              nvmlViolationTime_t *v) {
    ENTER(h, .05);
    double t = now();
    v->referenceTime = t * 1e6;
    v->violationTime = 0;
    if (p == NVML_PERF_POLICY_POWER)
        v->violationTime = 1e9 * integral_until((Gpu *)h, POWER_CAP, t);
    if (p == NVML_PERF_POLICY_THERMAL)
        v->violationTime = 1e9 * integral_until((Gpu *)h, HW_THERMAL, t);
    return 0;
}
#ifndef OLD
typedef struct { // integrals of the load values at a time
    double t, i[LOAD_VALUES];
} GpmSample;
API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t h, nvmlGpmSupport_t *s) {
    ENTER(h, .02);
    s->isSupportedDevice = 1;
    return 0;
}
API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *s) {
    ENTER(NULL, 0);
    *s = (nvmlGpmSample_t)calloc(1, sizeof(GpmSample));
    return 0;
}
API nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t s) {
    free(s);
    return 0;
}
API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t h, nvmlGpmSample_t s) {
    ENTER(h, .18);
    GpmSample *g = (GpmSample *)s;
    g->t = now();
    for (int j = 0; j < LOAD_VALUES; j++)
        g->i[j] = integral_until((Gpu *)h, j, g->t);
    return 0;
}
API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *m) {
    ENTER(NULL, .05);
    if (m->version != 1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    GpmSample *a = (GpmSample *)m->sample1, *b = (GpmSample *)m->sample2;
    double dt = b->t - a->t;
    for (unsigned k = 0; k < m->numMetrics; k++) {
        nvmlGpmMetric_t *x = &m->metrics[k];
        int j = -1;
        x->nvmlReturn = 0;
        switch (x->metricId) {
        case 1:
            j = UTIL;
            break;
        case 2:
            j = SM;
            break;
        case 3:
            j = SM;
            break;
        case 5:
        case 7:
            j = TENSOR;
            break;
        case 10:
            j = DRAM;
            break;
        case 20:
            j = TX;
            break;
        case 21:
            j = RX;
            break;
        case 4:
        case 6:
        case 8:
        case 9:
        case 11:
        case 12:
        case 13:
        case 60:
        case 61:
            x->value = 0;
            continue;
        default:
            x->nvmlReturn = NVML_ERROR_INVALID_ARGUMENT;
            continue;
        }
        x->value = dt < .1 ? NAN : (b->i[j] - a->i[j]) / dt;
        if (garbage)
            x->value = 1e30;
    }
    return 0;
}
#endif
