// What solvers/kernels/source.cu needs of CUDA, on a CPU: a block's threads are fibers that take
// turns, and __syncthreads hands on to the next one. Blocks run one after the other.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define __global__
#define __device__
#define __shared__ static

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

inline Index threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
constexpr std::size_t STACK = 1 << 16;
inline ucontext_t host;
inline std::vector<ucontext_t> fibers;
inline std::vector<char> stacks;
inline std::vector<bool> ended;
inline void (*body)(void*);
inline void* argument;

inline void enter() {
    body(argument);
    ended[threadIdx.x] = true;
    swapcontext(&fibers[threadIdx.x], &host);
}

// CuPy compiles with -ftz=true: subnormal floats are zeros, as operands and as results.
class Flushing {
#ifdef __SSE__
    unsigned before = _mm_getcsr();

public:
    Flushing() { _mm_setcsr(before | 0x8040u); }
    ~Flushing() { _mm_setcsr(before); }
#endif
};

// Every thread of the block up to its next __syncthreads, then all again, until all have ended.
inline void run_block(unsigned threads) {
    fibers.resize(threads);
    stacks.resize(threads * STACK);
    ended.assign(threads, false);
    for (unsigned t = 0; t < threads; ++t) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = &stacks[t * STACK];
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = nullptr;
        makecontext(&fibers[t], enter, 0);
    }
    for (unsigned left = threads; left;) {
        left = 0;
        for (unsigned t = 0; t < threads; ++t) {
            if (ended[t]) continue;
            threadIdx.x = t;
            swapcontext(&host, &fibers[t]);
            left += !ended[t];
        }
    }
}

template <typename... A, std::size_t... I>
void launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments,
            std::index_sequence<I...>) {
    auto call = [&] { kernel(*static_cast<A*>(arguments[I])...); };
    body = [](void* made) { (*static_cast<decltype(call)*>(made))(); };
    argument = &call;
    gridDim.x = blocks;
    blockDim.x = threads;
    const Flushing flushing;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) run_block(threads);
}

template <typename... A>
void launch(void (*kernel)(A...), unsigned blocks, unsigned threads, void** arguments) {
    launch(kernel, blocks, threads, arguments, std::index_sequence_for<A...>());
}
}  // namespace emulated

inline void __syncthreads() {
    const unsigned me = threadIdx.x;
    swapcontext(&emulated::fibers[me], &emulated::host);
    threadIdx.x = me;
}
