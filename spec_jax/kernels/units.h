// Work in units, shared between the caller and threads of XLA's pool.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace spec_jax {

// Numbers below 1.2e-38 count as 0, as in XLA's own code, and on each thread.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : old_(_mm_getcsr()) { _mm_setcsr(old_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(old_); }

 private:
  unsigned old_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(old_));
    asm volatile("msr fpcr, %0" : : "r"(old_ | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(old_)); }

 private:
  uint64_t old_;
#endif
};

// Threads take runs of units until none is left. A job derives from this and
// has `void Work()`, which loops over `Take`.
struct Units {
  int64_t num_units = 0;
  int64_t num_threads = 1;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};

  // Takes units [*begin, *end), half of a fair share of what is left: long
  // runs first, even ends. Returns false when nothing is left.
  bool Take(int64_t* begin, int64_t* end) {
    int64_t first = next.load(std::memory_order_relaxed);
    while (first < num_units) {
      const int64_t left = num_units - first;
      const int64_t count = std::max<int64_t>(1, left / (2 * num_threads));
      if (next.compare_exchange_weak(first, first + count)) {
        *begin = first;
        *end = first + count;
        return true;
      }
    }
    return false;
  }

  // Says that so many units taken are finished.
  void Finish(int64_t count) {
    done.fetch_add(count, std::memory_order_release);
  }
};

// Returns the processors this process may use; counted once.
inline int64_t NumProcessors() {
  static const int64_t count = [] {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
      return static_cast<int64_t>(CPU_COUNT(&set));
    }
#endif
    return static_cast<int64_t>(std::thread::hardware_concurrency());
  }();
  return std::max<int64_t>(1, count);
}

// Runs a job on this thread and at most `threads - 1` of the pool's (0: as
// many as the process may use) and returns when it is done. This thread waits
// only for units that somebody has begun, so it cannot wait for a task that
// the pool has no thread for; a task that comes late finds no unit left and
// touches no buffer.
template <class Job>
void RunUnits(xla::ffi::ThreadPool pool, std::shared_ptr<Job> job,
              int64_t threads) {
  if (job->num_units == 0) return;
  if (threads <= 0) threads = NumProcessors();
  threads = std::min(threads, std::max<int64_t>(1, pool.num_threads()));
  threads = std::min(threads, job->num_units);
  job->num_threads = threads;
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  for (int64_t spins = 0;
       job->done.load(std::memory_order_acquire) < job->num_units; ++spins) {
    if (spins > 4096) std::this_thread::yield();
  }
}

}  // namespace spec_jax
