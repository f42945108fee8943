// schedule.h: the learning rate of a step, and whether a step's loss or gradient is a spike.
#pragma once

#include <cmath>
#include <deque>

#include "flags.h"

// Step t counts from 1. Warm-up: lr*t/W. Then, with progress running from 0 to 1 until the floor is reached:
//   cosine    floor + (lr - floor) * (1 + cos(pi * progress)) / 2
//   linear    floor + (lr - floor) * (1 - progress)
//   wsd       lr, then the line of `linear` over the last part
//   constant  lr
inline double learning_rate(const Options& o, i64 t) {
    if (t <= o.warmup) { return o.lr * t / o.warmup; }
    if (o.schedule == "constant") { return o.lr; }
    i64 begin = o.warmup, end = o.decay_steps > 0 ? o.decay_steps : o.steps;
    if (o.schedule == "wsd") {
        end = o.steps;
        begin = std::max(o.warmup, end - (o.wsd_decay > 0 ? o.wsd_decay : o.steps / 5));
    }
    const double progress = t <= begin ? 0.0 : t >= end ? 1.0 : double(t - begin) / double(end - begin);
    const double share = o.schedule == "cosine" ? 0.5 * (1.0 + std::cos(M_PI * progress)) : 1.0 - progress;
    return o.min_lr + (o.lr - o.min_lr) * share;
}

// Remembers the last 128 values; a value far above their mean, in standard deviations, is a spike. Judges from 32 values on.
// A spike enters as the largest value that is none, so that a lasting new level is accepted after a while.
struct SpikeFilter {
    std::deque<double> values;

    bool is_spike(double value, double allowed_deviations) const { return allowed_deviations > 0 && value > limit(allowed_deviations); }
    void add(double value, double allowed_deviations) {
        values.push_back(allowed_deviations > 0 ? std::min(value, limit(allowed_deviations)) : value);
        if (values.size() > 128) { values.pop_front(); }
    }

private:
    double limit(double deviations) const {
        if (values.size() < 32) { return std::numeric_limits<double>::infinity(); }
        double mean = 0, variance = 0;
        for (double x : values) { mean += x / (double)values.size(); }
        for (double x : values) { variance += (x - mean) * (x - mean) / (double)values.size(); }
        return variance > 0 ? mean + deviations * std::sqrt(variance) : std::numeric_limits<double>::infinity();
    }
};
