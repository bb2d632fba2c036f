/* The script that a fake driver follows: power of each device in steps, and numbers that a test sets by name.
 *
 * Power P(t) is the last step at or before t; before the first step it is base_w. The energy counter is the closed-form
 * integral of P from 0 to t, and the 1 s average its difference quotient, so every figure has an exact answer. Time is
 * CLOCK_MONOTONIC since loading, or, with manual=1, now_s alone. */
#define _GNU_SOURCE
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_DEVICES 16
#define MAX_STEPS 512

struct step { double at_s, watts; };
static struct step power_steps[MAX_DEVICES][MAX_STEPS];
static int step_count[MAX_DEVICES];
static long fake_call_count, fake_write_count, fake_open_count;

struct number { const char *name; double value; };
static struct number numbers[] = { SCRIPT_NUMBERS { NULL, 0 } };

static struct number *find_number(const char *name) {
    for (struct number *n = numbers; n->name; n++)
        if (!strcmp(n->name, name)) return n;
    return NULL;
}

/* Looked up by name each time: slow, but nothing here needs to be fast. */
static double number(const char *name) {
    struct number *n = find_number(name);
    if (!n) { fprintf(stderr, "fake driver: no number %s\n", name); abort(); }
    return n->value;
}

API int fake_set(const char *name, double value) {
    struct number *n = find_number(name);
    if (!n) return 1;
    n->value = value;
    return 0;
}

API int fake_power(int device, double at_s, double watts) {
    if (device < 0 || device >= MAX_DEVICES || step_count[device] == MAX_STEPS) return 1;
    power_steps[device][step_count[device]++] = (struct step){ at_s, watts };
    return 0;
}

API long fake_calls(void) { return fake_call_count; }
API long fake_writes(void) { return fake_write_count; }   /* of anything that would change a device */
API long fake_open(void) { return fake_open_count; }      /* initialised and not shut down */

static double loaded_s;
static double monotonic_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

/* FAKE_SCRIPT="gpus=1;base_w=250" sets numbers where no test can: in a program that merely finds this library. */
__attribute__((constructor)) static void loaded(void) {
    loaded_s = monotonic_s();
    const char *given = getenv("FAKE_SCRIPT");
    if (!given) return;
    char text[2048], *rest = text, *item;
    snprintf(text, sizeof text, "%s", given);
    while ((item = strsep(&rest, ";"))) {
        char *equals = strchr(item, '=');
        if (!equals) continue;
        *equals = 0;
        if (fake_set(item, atof(equals + 1))) { fprintf(stderr, "fake driver: no number %s\n", item); abort(); }
    }
}

static double now_s(void) {
    fake_call_count++;
    if (number("delay_us") > 0) usleep((useconds_t)number("delay_us"));
    return number("manual") ? number("now_s") : monotonic_s() - loaded_s;
}

#ifdef SIMULATED_GPU /* power is that of the simulated device, at any time of the last seconds */
void simulated_power(int device, double at_s, double *watts, double *joules, double *clock);
void simulated_parts(int device, double at_s, double *memory_s, double *multiprocessors_s);
static double simulated_clock(int device, double t) {
    double watts, joules, clock;
    simulated_power(device, t + loaded_s, &watts, &joules, &clock);
    return clock;
}
static double power_w(int device, double t) {
    double watts, joules, clock;
    simulated_power(device, t + loaded_s, &watts, &joules, &clock);
    return watts;
}
static double energy_j(int device, double t) {
    double watts, joules, clock;
    simulated_power(device, t + loaded_s, &watts, &joules, &clock);
    return joules;
}
#else
static double power_w(int device, double t) {
    double watts = number("base_w");
    for (int i = 0; i < step_count[device] && power_steps[device][i].at_s <= t; i++)
        watts = power_steps[device][i].watts;
    return watts;
}

static double energy_j(int device, double t) {
    double total = 0, from = 0, watts = number("base_w");
    for (int i = 0; i < step_count[device] && power_steps[device][i].at_s < t; i++) {
        total += watts * (power_steps[device][i].at_s - from);
        from = power_steps[device][i].at_s;
        watts = power_steps[device][i].watts;
    }
    return total + watts * (t - from);
}
#endif

/* A sensor that is renewed every sensor_s, and repeats its value in between; likewise the counter. */
static double renewed(const char *period, double t) {
    double p = number(period);
    return p > 0 ? floor(t / p + 1e-9) * p : t;
}
static double sensed_w(int device, double t) { return power_w(device, renewed("sensor_s", t)); }
static double counted_j(int device, double t) { return energy_j(device, renewed("counter_s", t)); }
__attribute__((unused)) static double average_w(int device, double t) {
    double from = t > 1 ? t - 1 : 0;
    return t > from ? (energy_j(device, t) - energy_j(device, from)) / (t - from) : power_w(device, t);
}
