/* Stands in for CUDA's driver library: two devices, of which the second is a MIG instance.
   INIT_RESULT, SECONDS and OLD are given to the compiler. Synthetic. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned flags) { sleep(SECONDS); return flags ? 1 : INIT_RESULT; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7 + ordinal; return ordinal > 1; }

int cuGetErrorString(int code, const char **text) {
    *text = code == 803 ? "system has unsupported display driver / cuda driver combination" : NULL;
    return 0;
}

int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, device == 7 ? "NVIDIA Thor" : "NVIDIA A100 MIG 3g.20gb");
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    int thor = device == 7;
    if (attribute == 75) *value = thor ? 11 : 8;
    else if (attribute == 76) *value = 0;
    else if (attribute == 18) *value = thor;
    else return 1;
    return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)device << 32; return 0; }

#ifndef OLD
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 16 * device + 1, 16);
    return 0;
}
#endif
