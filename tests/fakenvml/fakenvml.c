/*
 * Stand-in for libnvidia-ml.so.1. It shares no code with the exporter and is written from NVIDIA's nvml.h (12.9).
 *
 * nvidia-ml-py loads it through the loader (LD_LIBRARY_PATH), as it loads NVIDIA's library. The directory FAKE_NVML_DIR
 * holds five text files, which are read again when they change. Times are Unix seconds, GPUs are indices.
 *
 *   schedule  GPU TIME WATTS UTIL% MEMUTIL% SM% TENSOR% DRAM% RX_MIB/S TX_MIB/S POWER_CAP_RATIO HW_THERMAL_RATIO
 *             The load of a GPU from TIME until the next line of this GPU.
 *   state     gpus COUNT | costs 1
 *             One setting per line. `costs 1` makes each call burn the CPU time that the call takes on an H100.
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
typedef struct { // constant load from `start` on: the values, and their integrals over the time before `start`
    double start, values[LOAD_VALUES], integrals[LOAD_VALUES];
} Segment;
typedef struct nvmlDevice_st { // GPU with its segments in the order of time
    int index;
    Segment *segments;
    int segment_count;
} Gpu;
static Gpu gpus[MAX_GPUS];
static int gpu_count = 2, costs = 0;
#define DRIVER_VERSION "580.159.04"
#define MEMORY_BYTES 85520809984ull
#define RESERVED_BYTES 503316480ull
typedef struct { // line of `errors`
    char function[64];
    int gpu, code;
    double from, to, hang_seconds;
    int garbage;
} Fault;
static Fault faults[64];
static int fault_count;
typedef struct { // line of `procs`
    unsigned pid;
    int gpu;
    double bytes, sm_percent;
} Process;
static Process processes[64];
static int process_count;
typedef struct { // line of `xids`
    double time;
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
static void burn_cpu(double milliseconds) {
    if (!costs)
        return;
    double end = cpu_seconds() + milliseconds * 1e-3;
    while (cpu_seconds() < end)
        ;
}
// Open a file of the directory if it has changed since it was last read. The files are numbered from 0 to 4.
static FILE *open_if_changed(const char *name, int number) {
    const char *directory = getenv("FAKE_NVML_DIR");
    char path[512];
    snprintf(path, sizeof path, "%s/%s", directory ? directory : ".", name);
    struct stat status;
    if (stat(path, &status))
        return NULL;
    struct timespec *last = &modified_times[number];
    if (status.st_mtim.tv_sec == last->tv_sec && status.st_mtim.tv_nsec == last->tv_nsec)
        return NULL;
    *last = status.st_mtim;
    return fopen(path, "r");
}
static void load_files(void) {
    FILE *f;
    char line[512];
    if ((f = open_if_changed("schedule", 0))) {
        for (int index = 0; index < MAX_GPUS; index++) {
            gpus[index].index = index;
            gpus[index].segment_count = 0;
        }
        while (fgets(line, sizeof line, f)) {
            int index;
            Segment segment;
            memset(&segment, 0, sizeof segment);
            double *v = segment.values;
            int field_count = sscanf(line, "%d %lf %lf %lf %lf %lf %lf %lf %lf %lf %lf %lf", &index, &segment.start,
                                     &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7], &v[8], &v[9]);
            if (field_count < 3 || index < 0 || index >= MAX_GPUS)
                continue;
            Gpu *gpu = &gpus[index];
            gpu->segments = realloc(gpu->segments, sizeof(Segment) * (gpu->segment_count + 1));
            if (gpu->segment_count) {
                Segment *previous = &gpu->segments[gpu->segment_count - 1];
                for (int j = 0; j < LOAD_VALUES; j++)
                    segment.integrals[j] =
                        previous->integrals[j] + previous->values[j] * (segment.start - previous->start);
            }
            gpu->segments[gpu->segment_count++] = segment;
        }
        fclose(f);
    }
    if ((f = open_if_changed("state", 1))) {
        int number;
        while (fgets(line, sizeof line, f)) {
            if (sscanf(line, "gpus %d", &number) == 1)
                gpu_count = number;
            else if (sscanf(line, "costs %d", &number) == 1)
                costs = number;
        }
        fclose(f);
    }
    if ((f = open_if_changed("errors", 2))) {
        fault_count = 0;
        while (fgets(line, sizeof line, f) && fault_count < 64) {
            Fault *fault = &faults[fault_count];
            memset(fault, 0, sizeof *fault);
            fault->to = 1e18;
            if (sscanf(line, "%63s %d %d %lf %lf %lf %d", fault->function, &fault->gpu, &fault->code, &fault->from,
                       &fault->to, &fault->hang_seconds, &fault->garbage) >= 3)
                fault_count++;
        }
        fclose(f);
    }
    if ((f = open_if_changed("procs", 3))) {
        process_count = 0;
        while (fgets(line, sizeof line, f) && process_count < 64) {
            Process *process = &processes[process_count];
            process->sm_percent = 0;
            if (sscanf(line, "%u %d %lf %lf", &process->pid, &process->gpu, &process->bytes, &process->sm_percent) >= 3)
                process_count++;
        }
        fclose(f);
    }
    if ((f = open_if_changed("xids", 4))) {
        xid_count = 0;
        while (fgets(line, sizeof line, f) && xid_count < 256) {
            Xid *event = &xids[xid_count];
            if (sscanf(line, "%lf %d %llu", &event->time, &event->gpu, &event->xid) >= 3)
                xid_count++;
        }
        fclose(f);
    }
}
// Return the index of the segment at a time, or -1 before the first.
static int segment_at(Gpu *gpu, double time) {
    int low = 0, high = gpu->segment_count - 1;
    if (high < 0 || time < gpu->segments[0].start)
        return -1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (gpu->segments[middle].start <= time)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}
static double value_at(Gpu *gpu, int value, double time) {
    int index = segment_at(gpu, time);
    return index < 0 ? 0 : gpu->segments[index].values[value];
}
// Return the integral of a load value from the first segment to a time.
static double integral_until(Gpu *gpu, int value, double time) {
    int index = segment_at(gpu, time);
    if (index < 0)
        return 0;
    Segment *segment = &gpu->segments[index];
    return segment->integrals[value] + segment->values[value] * (time - segment->start);
}
static double mean_between(Gpu *gpu, int value, double start, double end) {
    return (integral_until(gpu, value, end) - integral_until(gpu, value, start)) / (end - start);
}

// Return whether a function reads a GPU: the other functions initialize NVML, list GPUs or deliver events.
static int reads_gpu(const char *function) {
    static const char *const prefixes[] = {"nvmlInit",           "nvmlShutdown",        "nvmlSystem",
                                           "nvmlDeviceGetCount", "nvmlDeviceGetHandle", "nvmlDeviceGetUUID",
                                           "nvmlEvent",          "nvmlErrorString"};
    for (size_t k = 0; k < sizeof prefixes / sizeof *prefixes; k++)
        if (!strncmp(function, prefixes[k], strlen(prefixes[k])))
            return 0;
    return 1;
}

static int garbage; // GARBAGE of the current call; enter_call() sets it
// Read changed files, wait and burn CPU time as configured, and return the code of a matching line of `errors`.
static nvmlReturn_t enter_call(const char *function, Gpu *gpu, double milliseconds) {
    pthread_mutex_lock(&mutex);
    load_files();
    double time = now(), hang_seconds = 0;
    int code = 0;
    garbage = 0;
    for (int k = 0; k < fault_count; k++) {
        Fault *fault = &faults[k];
        if (time < fault->from || time >= fault->to)
            continue;
        if (fault->gpu >= 0 && (!gpu || fault->gpu != gpu->index))
            continue;
        if (!strcmp(fault->function, "*") ? !reads_gpu(function) && fault->code != NVML_ERROR_GPU_IS_LOST
                                          : strcmp(fault->function, function))
            continue;
        if (fault->code)
            code = fault->code;
        if (fault->hang_seconds)
            hang_seconds = fault->hang_seconds;
        if (fault->garbage)
            garbage = fault->garbage;
    }
    pthread_mutex_unlock(&mutex);
    if (hang_seconds)
        usleep(hang_seconds * 1e6);
    burn_cpu(milliseconds);
    return code;
}
// Return from a function of NVML if the function fails now.
#define ENTER(gpu, milliseconds)                                        \
    do {                                                                \
        nvmlReturn_t code_ = enter_call(__func__, gpu, milliseconds);   \
        if (code_)                                                      \
            return code_;                                               \
    } while (0)
#define API __attribute__((visibility("default")))

API nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    ENTER(NULL, 0);
    return 0;
}
API nvmlReturn_t nvmlShutdown(void) {
    return 0;
}
API const char *nvmlErrorString(nvmlReturn_t code) {
    static __thread char text[64];
    snprintf(text, sizeof text, "fake error %d", code);
    return text;
}
API nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned size) {
    ENTER(NULL, 0);
    snprintf(text, size, DRIVER_VERSION);
    return 0;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *result) {
    ENTER(NULL, 0);
    *result = 13000;
    return 0;
}
API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *result) {
    ENTER(NULL, 0);
    *result = 13000;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *result) {
    ENTER(NULL, 0);
    *result = gpu_count;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *result) {
    ENTER(index < MAX_GPUS ? &gpus[index] : NULL, 0);
    if ((int)index >= gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    gpus[index].index = index;
    *result = &gpus[index];
    return 0;
}
API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t gpu, char *text, unsigned size) {
    ENTER(gpu, 0);
    snprintf(text, size, "GPU-0000000%d-fa4e-4e47-8888-123456789abc", gpu->index);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t gpu, char *text, unsigned size) {
    ENTER(gpu, 0);
    snprintf(text, size, "NVIDIA H100 80GB HBM3");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t gpu, char *text, unsigned size) {
    ENTER(gpu, 0);
    snprintf(text, size, "165422300000%d", gpu->index);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t gpu, char *text, unsigned size) {
    ENTER(gpu, 0);
    snprintf(text, size, "96.00.5E.00.01");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t gpu, char *text, unsigned size) {
    ENTER(gpu, 0);
    snprintf(text, size, "692-2G520-0200-000");
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, 0);
    *result = gpu->index;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t gpu, nvmlDeviceArchitecture_t *result) {
    ENTER(gpu, 0);
    *result = NVML_DEVICE_ARCH_HOPPER;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t gpu, int *major, int *minor) {
    ENTER(gpu, 0);
    *major = 9;
    *minor = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *result) {
    ENTER(gpu, 0);
    memset(result, 0, sizeof *result);
    result->bus = 0x18 + gpu->index;
    snprintf(result->busId, sizeof result->busId, "00000000:%02X:00.0", result->bus);
    snprintf(result->busIdLegacy, sizeof result->busIdLegacy, "0000:%02X:00.0", result->bus);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *result) {
    ENTER(gpu, .04);
    double end = floor(now() * 5) / 5; // of the last sampling period of 0.2 s
    if (garbage) {
        result->gpu = 0xffffffffu;
        result->memory = 4000000;
        return 0;
    }
    result->gpu = lround(mean_between(gpu, UTIL, end - .2, end));
    result->memory = lround(mean_between(gpu, MEMUTIL, end - .2, end));
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *result) {
    ENTER(gpu, .04);
    result->total = MEMORY_BYTES;
    result->used = RESERVED_BYTES;
    result->free = result->total - result->used;
    if (garbage)
        result->used = ~0ull;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *result) {
    ENTER(gpu, .04);
    if (result->version != nvmlMemory_v2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result->total = MEMORY_BYTES;
    result->reserved = RESERVED_BYTES;
    result->used = 0;
    result->free = result->total - result->reserved;
    if (garbage)
        result->used = ~0ull;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t gpu, nvmlTemperature_t *result) {
    ENTER(gpu, .03);
    result->temperature = garbage ? -1 : 50;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t gpu, nvmlMarginTemperature_t *result) {
    ENTER(gpu, .03);
    result->marginTemperature = 37;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, 0);
    *result = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t gpu, nvmlEccSramErrorStatus_t *result) {
    ENTER(gpu, .05);
    result->bThresholdExceeded = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, nvmlTemperatureSensors_t sensor, unsigned *result) {
    ENTER(gpu, .03);
    *result = 50;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t gpu, nvmlTemperatureThresholds_t threshold,
                                                   unsigned *result) {
    ENTER(gpu, .03);
    if (threshold == NVML_TEMPERATURE_THRESHOLD_SHUTDOWN)
        *result = 95;
    else if (threshold == NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        *result = 89;
    else
        return NVML_ERROR_NOT_SUPPORTED;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t gpu, nvmlClockType_t clock, unsigned *result) {
    ENTER(gpu, .04);
    int is_busy = value_at(gpu, UTIL, now()) > 0;
    *result = clock == NVML_CLOCK_MEM ? 2619 : is_busy ? 1980 : 345;
    if (garbage)
        *result = 0xffffffff;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    double end = floor(now() * 10) / 10; // of the averaged second
    *result = lround(1000 * mean_between(gpu, WATTS, end - 1, end));
    if (garbage)
        *result = 0xfffffffe;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 700000;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 700000;
    return 0;
}
// Return the energy counter, which the driver updates every 100 ms.
static unsigned long long energy_millijoules(Gpu *gpu) {
    return (unsigned long long)(1000 * integral_until(gpu, WATTS, floor(now() * 10) / 10));
}
API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t gpu, unsigned long long *result) {
    ENTER(gpu, 4.5);
    *result = energy_millijoules(gpu);
    if (garbage == 1)
        *result = ~0ull;
    if (garbage == 2)
        *result /= 3;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 5;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 5;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 16;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 16;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .05);
    *result = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t gpu, nvmlMemoryErrorType_t kind,
                                                 nvmlEccCounterType_t period, nvmlMemoryLocation_t location,
                                                 unsigned long long *result) {
    ENTER(gpu, .05);
    if (location != NVML_MEMORY_LOCATION_DRAM && location != NVML_MEMORY_LOCATION_SRAM)
        return NVML_ERROR_NOT_SUPPORTED;
    *result = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t gpu, unsigned *corrected, unsigned *uncorrected,
                                           unsigned *is_pending, unsigned *has_failed) {
    ENTER(gpu, .05);
    *corrected = *uncorrected = *is_pending = *has_failed = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t gpu, unsigned link, nvmlEnableState_t *result) {
    ENTER(gpu, .01);
    return NVML_ERROR_NOT_SUPPORTED;
}
API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu, .01);
    *current = *pending = 0;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t gpu, unsigned *result) {
    ENTER(gpu, .01);
    *result = 7;
    return 0;
}
API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t gpu, unsigned index, nvmlDevice_t *result) {
    ENTER(gpu, .01);
    return NVML_ERROR_NOT_FOUND;
}
static unsigned processes_on(Gpu *gpu) {
    unsigned count = 0;
    for (int k = 0; k < process_count; k++)
        count += processes[k].gpu == gpu->index;
    return count;
}
static nvmlReturn_t list_processes(Gpu *gpu, unsigned *size, nvmlProcessInfo_v2_t *result) {
    unsigned count = processes_on(gpu);
    if (*size < count || (!result && count)) {
        *size = count;
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    *size = count;
    for (int k = 0; k < process_count; k++)
        if (processes[k].gpu == gpu->index) {
            result->pid = garbage ? 0x7fffffff : processes[k].pid;
            result->usedGpuMemory = processes[k].bytes < 0 ? ~0ull : (unsigned long long)processes[k].bytes;
            result->gpuInstanceId = result->computeInstanceId = 0xffffffff;
            result++;
        }
    return 0;
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t gpu, unsigned *size, nvmlProcessInfo_t *result) {
    ENTER(gpu, .1);
    return list_processes(gpu, size, (nvmlProcessInfo_v2_t *)result); // the same structure
}
API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t gpu, unsigned *size,
                                                         nvmlProcessInfo_v2_t *result) {
    ENTER(gpu, .1);
    return list_processes(gpu, size, result);
}
API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t gpu, nvmlProcessUtilizationSample_t *result,
                                                 unsigned *size, unsigned long long last_microseconds) {
    ENTER(gpu, .2);
    unsigned count = processes_on(gpu);
    if (!result || *size < count) {
        *size = count;
        return count ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_ERROR_NOT_FOUND;
    }
    unsigned long long microseconds = (unsigned long long)(floor(now() * 2) / 2 * 1e6); // a sample every 0.5 s
    if (microseconds <= last_microseconds || !count)
        return NVML_ERROR_NOT_FOUND;
    *size = count;
    for (int k = 0; k < process_count; k++)
        if (processes[k].gpu == gpu->index) {
            memset(result, 0, sizeof *result);
            result->pid = processes[k].pid;
            result->timeStamp = microseconds;
            result->smUtil = processes[k].sm_percent;
            result++;
        }
    return 0;
}
// Return the time of a sample of a ring buffer: samples are not exactly periodic.
static double sample_time(long long number, double period, double max_jitter) {
    return number * period + ((number * 2654435761u) % 1000) / 1000. * max_jitter;
}
API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t gpu, nvmlSamplingType_t type, unsigned long long last_microseconds,
                                      nvmlValueType_t *value_type, unsigned *size, nvmlSample_t *result) {
    if (type != NVML_TOTAL_POWER_SAMPLES && type != NVML_GPU_UTILIZATION_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    int is_power = type == NVML_TOTAL_POWER_SAMPLES;
    ENTER(gpu, !result ? 0 : is_power ? .5 : 1.75);
    double period = is_power ? .02 : .2, max_jitter = is_power ? .0008 : .002;
    int depth = is_power ? 119 : 70; // samples in the ring buffer
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (!result) {
        *size = depth + 1;
        return 0;
    }
    long long newest = (long long)floor(now() / period);
    unsigned count = 0;
    for (long long k = newest - depth + 1; k <= newest && count < *size; k++) {
        double time = sample_time(k, period, max_jitter);
        if (time > now())
            break;
        unsigned long long microseconds = (unsigned long long)llround(time * 1e6);
        if (microseconds <= last_microseconds)
            continue;
        double mean = mean_between(gpu, is_power ? WATTS : UTIL, sample_time(k - 1, period, max_jitter), time);
        memset(&result[count].sampleValue, 0, sizeof result[count].sampleValue);
        result[count].timeStamp = microseconds;
        result[count].sampleValue.uiVal = garbage ? 0xffffffffu : (unsigned)lround(is_power ? mean * 1000 : mean);
        count++;
    }
    *size = count;
    return count ? 0 : NVML_ERROR_NOT_FOUND;
}
static void set_uint(nvmlFieldValue_t *field, unsigned number) {
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.uiVal = number;
}
static void read_field(Gpu *gpu, nvmlFieldValue_t *field, double time) {
    field->nvmlReturn = 0;
    field->timestamp = time * 1e6;
    field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ullVal = 0;
    switch (field->fieldId) {
    case 74: // nanoseconds by reason of reduced clocks: power cap
        field->value.ullVal = 1e9 * integral_until(gpu, POWER_CAP, time);
        break;
    case 75: // thermal
    case 270: // hardware thermal, from driver 580.82 on
        field->value.ullVal = 1e9 * integral_until(gpu, HW_THERMAL, time);
        break;
    case 78: // low utilization
        field->value.ullVal = 1e9 * (time - 1.79e9);
        break;
    case 76: // further reasons
    case 77:
    case 79:
    case 269:
    case 271:
        break;
    case 82: // temperature of the memory
        set_uint(field, 52);
        break;
    case 173: // PCIe errors
    case 179:
    case 180:
    case 230: // recovery action
        set_uint(field, 0);
        break;
    case 251: // settings of power smoothing
    case 252:
    case 253:
        field->valueType = NVML_VALUE_TYPE_DOUBLE;
        field->value.dVal = 123456.;
        break;
    default:
        field->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
    if (garbage && field->fieldId >= 74 && field->fieldId <= 79)
        field->value.ullVal = ~0ull;
}
API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t gpu, int count, nvmlFieldValue_t *fields) {
    ENTER(gpu, .03);
    double time = now();
    for (int k = 0; k < count; k++)
        read_field(gpu, &fields[k], time);
    return 0;
}
API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t gpu, unsigned long long *result) {
    ENTER(gpu, 0);
    *result = 0xff9f;
    return 0;
}
typedef struct { // events of the GPUs in the mask since its creation
    unsigned gpu_mask;
    double created_at;
    double delivered_times[256]; // time of the event that was delivered last, by line of `xids`
} EventSet;
API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *result) {
    ENTER(NULL, 0);
    EventSet *set = calloc(1, sizeof *set);
    set->created_at = now();
    *result = (nvmlEventSet_t)set;
    return 0;
}
API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t gpu, unsigned long long types, nvmlEventSet_t set) {
    ENTER(gpu, 0);
    ((EventSet *)set)->gpu_mask |= 1u << gpu->index;
    return 0;
}
API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t handle, nvmlEventData_t *result, unsigned milliseconds) {
    EventSet *set = (EventSet *)handle;
    double end = now() + milliseconds / 1e3;
    for (;;) {
        ENTER(NULL, 0);
        double time = now();
        for (int k = 0; k < xid_count; k++) {
            Xid *event = &xids[k];
            int is_registered = set->gpu_mask >> event->gpu & 1;
            int is_due = event->time >= set->created_at && event->time <= time;
            if (!is_registered || !is_due || set->delivered_times[k] == event->time)
                continue;
            set->delivered_times[k] = event->time;
            memset(result, 0, sizeof *result);
            result->device = &gpus[event->gpu];
            result->eventType = nvmlEventTypeXidCriticalError;
            result->eventData = event->xid;
            return 0;
        }
        if (time >= end)
            return NVML_ERROR_TIMEOUT;
        usleep(50000);
    }
}
typedef struct { // integrals of the load values at a time
    double time, integrals[LOAD_VALUES];
} GpmSample;
API nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t gpu, nvmlGpmSupport_t *result) {
    ENTER(gpu, .02);
    result->isSupportedDevice = 1;
    return 0;
}
API nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *result) {
    ENTER(NULL, 0);
    *result = (nvmlGpmSample_t)calloc(1, sizeof(GpmSample));
    return 0;
}
API nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t gpu, nvmlGpmSample_t handle) {
    ENTER(gpu, .18);
    GpmSample *sample = (GpmSample *)handle;
    sample->time = now();
    for (int value = 0; value < LOAD_VALUES; value++)
        sample->integrals[value] = integral_until(gpu, value, sample->time);
    return 0;
}
// Return the load value of a GPM metric, -1 for a metric that is always 0, or -2 for an unknown metric.
static int gpm_value(unsigned metric) {
    switch (metric) {
    case NVML_GPM_METRIC_GRAPHICS_UTIL:
        return UTIL;
    case NVML_GPM_METRIC_SM_UTIL:
    case NVML_GPM_METRIC_SM_OCCUPANCY:
        return SM;
    case NVML_GPM_METRIC_ANY_TENSOR_UTIL:
    case NVML_GPM_METRIC_HMMA_TENSOR_UTIL:
        return TENSOR;
    case NVML_GPM_METRIC_DRAM_BW_UTIL:
        return DRAM;
    case NVML_GPM_METRIC_PCIE_TX_PER_SEC:
        return TX;
    case NVML_GPM_METRIC_PCIE_RX_PER_SEC:
        return RX;
    case NVML_GPM_METRIC_IMMA_TENSOR_UTIL:
    case NVML_GPM_METRIC_FP32_UTIL:
    case NVML_GPM_METRIC_FP16_UTIL:
    case NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC:
    case NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC:
        return -1;
    default:
        return -2;
    }
}
API nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *request) {
    ENTER(NULL, .05);
    if (request->version != NVML_GPM_METRICS_GET_VERSION)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    GpmSample *earlier = (GpmSample *)request->sample1, *later = (GpmSample *)request->sample2;
    double seconds = later->time - earlier->time;
    for (unsigned k = 0; k < request->numMetrics; k++) {
        nvmlGpmMetric_t *metric = &request->metrics[k];
        int value = gpm_value(metric->metricId);
        metric->nvmlReturn = value == -2 ? NVML_ERROR_INVALID_ARGUMENT : 0;
        metric->value = 0;
        if (value < 0)
            continue;
        metric->value =
            seconds < .1 ? NAN : (later->integrals[value] - earlier->integrals[value]) / seconds;
        if (garbage)
            metric->value = 1e30;
    }
    return 0;
}
