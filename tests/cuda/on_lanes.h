// What CUDA's words are when g++ compiles a kernel with its lanes: the threads of a block are fibers, which go on from one
// collective to the next in an order that alternates. Lanes that come to different collectives, or do not come, end the
// program; so does an access that is not aligned as a GPU wants it (-fsanitize=alignment).
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "words.h"

#define __CUDACC__ 1
#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)

namespace lanes {
constexpr unsigned WARP_LANES = 32, BLOCK_THREADS = 64, STACK_BYTES = 1 << 17;
enum What { NONE, XOR, DOWN, UP, FROM, ANY, BALLOT, ALL_THREADS };

struct Fiber {
    ucontext_t context;
    bool done;
    unsigned came, met;  // at how many collectives of its warp, and of its block
    What what[2];
    unsigned long long value[2];
};

inline ucontext_t scheduler;
inline Fiber fibers[BLOCK_THREADS];
inline std::vector<char> stacks;
inline unsigned current;
inline bool moved;
inline std::mutex one_at_a_time;
inline void (*body)();

struct Dimension {
    unsigned x = 1, y = 1, z = 1;
};
inline Dimension block_index, block_dimension, grid_dimension;

[[noreturn]] inline void fail(const char *what) {
    std::fprintf(stderr, "a kernel on lanes: %s\n", what);
    std::abort();
}

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

// Wait until all lanes of this warp have come with a value, and return whose turn of two it is.
template <class T>
unsigned exchange(T value, What what) {
    static_assert(sizeof(T) <= 8);
    Fiber &mine = fibers[current];
    unsigned turn = mine.came++ & 1, first = current / WARP_LANES * WARP_LANES;
    mine.value[turn] = 0;
    std::memcpy(&mine.value[turn], &value, sizeof(T));
    mine.what[turn] = what;
    moved = true;
    for (unsigned lane = 0; lane < WARP_LANES; ++lane) {
        Fiber &other = fibers[first + lane];
        while (other.came < mine.came) {
            if (other.done) fail("a lane ended while others wait for it");
            yield();
        }
        if (other.came == mine.came && other.what[turn] != what) fail("lanes came to different collectives");
    }
    return turn;
}

template <class T>
T of(unsigned lane, unsigned turn) {
    T value;
    std::memcpy(&value, &fibers[current / WARP_LANES * WARP_LANES + lane].value[turn], sizeof(T));
    return value;
}

inline void enter() {
    body();
    fibers[current].done = true;
    moved = true;
    yield();
}

inline void run_block() {
    stacks.resize(BLOCK_THREADS * STACK_BYTES);
    for (unsigned number = 0; number < BLOCK_THREADS; ++number) {
        Fiber &fiber = fibers[number];
        fiber.done = false, fiber.came = fiber.met = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = stacks.data() + number * STACK_BYTES;
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned pass = 0, left = BLOCK_THREADS; left > 0; ++pass) {
        left = 0, moved = false;
        for (unsigned number = 0; number < BLOCK_THREADS; ++number) {
            current = pass & 1 ? BLOCK_THREADS - 1 - number : number;
            if (fibers[current].done) continue;
            swapcontext(&scheduler, &fibers[current].context);
            left += !fibers[current].done;
        }
        if (left > 0 && !moved) fail("its threads wait for each other for ever");
    }
}

template <class K>
struct Kernel;
template <class... A>
struct Kernel<void (*)(A...)> {
    static inline void (*function)(A...);
    static inline void **arguments;
    template <size_t... I>
    static void call(std::index_sequence<I...>) {
        function(*static_cast<std::remove_reference_t<A> *>(arguments[I])...);
    }
    static void run(void (*kernel)(A...), unsigned long long workers, void **args) {
        std::lock_guard<std::mutex> alone(one_at_a_time);
        function = kernel, arguments = args;
        body = [] { call(std::index_sequence_for<A...>{}); };
        block_dimension.x = BLOCK_THREADS;
        grid_dimension.x = static_cast<unsigned>((workers * WARP_LANES + BLOCK_THREADS - 1) / BLOCK_THREADS);
        for (block_index.x = 0; block_index.x < grid_dimension.x; ++block_index.x) run_block();
    }
    static void sizes(int *out) {
        int at = 0;
        ((out[at++] = sizeof(A)), ...);
        out[at] = 0;
    }
};
}  // namespace lanes

#define KERNEL(name)                                                                                                  \
    extern "C" void launch_##name(unsigned long long workers, void **args) {                                          \
        lanes::Kernel<decltype(&name)>::run(name, workers, args);                                                     \
    }                                                                                                                 \
    extern "C" void sizes_##name(int *out) { lanes::Kernel<decltype(&name)>::sizes(out); }

#define blockIdx lanes::block_index
#define blockDim lanes::block_dimension
#define gridDim lanes::grid_dimension
#define threadIdx (lanes::Dimension{lanes::current, 0, 0})

inline void __syncthreads() {
    lanes::Fiber &mine = lanes::fibers[lanes::current];
    ++mine.met;
    lanes::moved = true;
    for (unsigned number = 0; number < lanes::BLOCK_THREADS; ++number) {
        while (lanes::fibers[number].met < mine.met) {
            if (lanes::fibers[number].done) lanes::fail("a thread ended while others wait for it");
            lanes::yield();
        }
    }
}
inline unsigned own_lane() { return lanes::current % lanes::WARP_LANES; }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned apart) {
    return lanes::of<T>(own_lane() ^ apart, lanes::exchange(value, lanes::XOR));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned apart) {
    unsigned turn = lanes::exchange(value, lanes::DOWN), from = own_lane() + apart;
    return lanes::of<T>(from < lanes::WARP_LANES ? from : own_lane(), turn);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned apart) {
    unsigned turn = lanes::exchange(value, lanes::UP);
    return lanes::of<T>(own_lane() >= apart ? own_lane() - apart : own_lane(), turn);
}
template <class T>
T __shfl_sync(unsigned, T value, unsigned from) {
    unsigned turn = lanes::exchange(value, lanes::FROM);
    return lanes::of<T>(from % lanes::WARP_LANES, turn);
}
inline unsigned __ballot_sync(unsigned, int value) {
    unsigned turn = lanes::exchange(static_cast<unsigned>(value != 0), lanes::BALLOT), bits = 0;
    for (unsigned lane = 0; lane < lanes::WARP_LANES; ++lane) bits |= lanes::of<unsigned>(lane, turn) << lane;
    return bits;
}
inline int __any_sync(unsigned, int value) {
    unsigned turn = lanes::exchange(static_cast<unsigned>(value != 0), lanes::ANY);
    for (unsigned lane = 0; lane < lanes::WARP_LANES; ++lane) {
        if (lanes::of<unsigned>(lane, turn)) return 1;
    }
    return 0;
}
inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
