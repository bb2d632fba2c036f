/* What can be set on a fake device, and a plan of what becomes of each call that sets something: 'o' does it, 'f' fails,
 * 'l' says that it has done it and has not, 'd' does it and fails all the same, 'r' does it and lets no reading succeed until
 * the next such call. 'k' does it and 'K' does not, and both kill the process. Calls beyond the plan are done. With
 * FAKE_STATE=FILE the state is in that file, shared by all processes, and outlives them as a device's does. */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#ifdef SIMULATED_GPU /* it reads the limits at the head of this file */
const char *simulated_limits_file(void);
double simulated_limit_w(int device);
int simulated_devices(void);
int simulated_fault(void); /* that every call returns, 0 for none */
unsigned long long simulated_memory_bytes(void);
#endif
struct settable { double limit_w[MAX_DEVICES]; double locked_mhz[MAX_DEVICES]; long calls; char plan[64]; };
static struct settable *settable(void) {
    static struct settable own, *state;
    if (state) return state;
#ifdef SIMULATED_GPU
    const char *path = simulated_limits_file();
#else
    const char *path = getenv("FAKE_STATE");
#endif
    state = &own;
    if (path) {
        int file = open(path, O_RDWR);
        if (file < 0) abort();
        state = mmap(NULL, sizeof own, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (state == MAP_FAILED) abort();
        close(file);
    }
    return state;
}
API int fake_plan(const char *plan) {
    settable()->calls = 0;
    snprintf(settable()->plan, sizeof settable()->plan, "%s", plan);
    return 0;
}
static char planned(void) {
    fake_write_count++;
    long call = settable()->calls++;
    return call < (long)strlen(settable()->plan) ? settable()->plan[call] : 'o';
}
/* Whether the plan has readings fail now. */
static int unreadable(void) {
    long last = settable()->calls - 1;
    return last >= 0 && last < (long)strlen(settable()->plan) && settable()->plan[last] == 'r';
}
/* Does a call by the plan: sets the value, or does not, and fails, or does not. */
static int put(double *value, double wanted) {
    char what = planned();
    if (strchr("odrk", what)) *value = wanted;
    if (what == 'k' || what == 'K') kill(getpid(), SIGKILL);
    return what == 'f' || what == 'd' ? 999 : 0;
}
API double fake_locked_mhz(int g) { return settable()->locked_mhz[g]; }
API double fake_limit_w(int g) { return settable()->limit_w[g]; }
