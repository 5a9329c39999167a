// Runs: a thread processes consecutive elements, mostly 16 bytes, which are one load and one store.
#pragma once
#include "memory.cuh"

// N elements in registers. Elements below 4 bytes stay packed in words until they are used: otherwise each would take a
// register.
template <class T, u32 N, bool PACKED = (sizeof(T) < 4 && N * sizeof(T) >= 4)>
struct alignas(N * sizeof(T)) Run {
    T of[N];

    __device__ T get(u32 i) const { return of[i]; }
    __device__ void set(u32 i, T element) { of[i] = element; }
};

template <class T, u32 N>
struct alignas(N * sizeof(T)) Run<T, N, true> {
    static constexpr u32 IN_WORD = 4 / sizeof(T), BITS = 8 * sizeof(T), MASK = (1u << BITS) - 1;
    u32 words[N / IN_WORD] = {};

    __device__ T get(u32 i) const {
        u16 bits = (u16)(words[i / IN_WORD] >> BITS * (i % IN_WORD) & MASK);
        T element;
        if constexpr (sizeof(T) == 2) *(u16 *)&element = bits;
        else *(u8 *)&element = (u8)bits;
        return element;
    }
    __device__ void set(u32 i, T element) {
        u32 bits, shift = BITS * (i % IN_WORD);
        if constexpr (sizeof(T) == 2) bits = *(u16 *)&element;
        else bits = *(u8 *)&element;
        words[i / IN_WORD] = (words[i / IN_WORD] & ~(MASK << shift)) | bits << shift;
    }
};

// Return the same bytes as a run of another element type.
template <class Other, class Run>
__device__ inline Other taken_as(const Run &run) {
    static_assert(sizeof(Other) == sizeof(Run));
    return *(const Other *)&run;
}

// The number of elements of T in one load.
template <class T>
constexpr u32 WIDE = 16 / sizeof(T);

// Read N elements from an address aligned for one element. The branches are the same for all threads, and loads
// narrower than 16 bytes hit lines in the L1 cache that the neighbors' loads fetched.
template <class T, u32 N>
__device__ inline Run<T, N> read(const T *from) {
    Run<T, N> run;
    if ((u64)from % sizeof(run) == 0) return *(const Run<T, N> *)from;
    if constexpr (sizeof(T) < 4 && sizeof(run) > 4) {
        if ((u64)from % 4 == 0) {
            UNROLL for (u32 k = 0; k < sizeof(run) / 4; ++k) run.words[k] = ((const u32 *)from)[k];
            return run;
        }
    }
    UNROLL for (u32 k = 0; k < N; ++k) run.set(k, from[k]);
    return run;
}

// Write a run to an address that is a multiple of its size.
template <class Run>
__device__ inline void write_at_once(void *to, const Run &run) {
#ifdef __CUDA_ARCH__
    // An explicit instruction: the compiler would see several narrow stores, equal to those for unaligned addresses,
    // and would merge both cases.
    const u32 *words = (const u32 *)&run;
    if constexpr (sizeof(run) == 16) {
        asm volatile("st.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                     "r"(words[3])
                     : "memory");
    } else if constexpr (sizeof(run) == 8) {
        asm volatile("st.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
    } else {
        *(Run *)to = run;
    }
#else
    *(Run *)to = run;
#endif
}

// Write N elements to an address aligned for one element.
template <class T, u32 N>
__device__ inline void write(T *to, const Run<T, N> &run) {
    if ((u64)to % sizeof(run) == 0) {
        write_at_once(to, run);
        return;
    }
    if constexpr (sizeof(T) < 4 && sizeof(run) > 4) {
        if ((u64)to % 4 == 0) {
            UNROLL for (u32 k = 0; k < sizeof(run) / 4; ++k) ((u32 *)to)[k] = run.words[k];
            return;
        }
    }
    UNROLL for (u32 k = 0; k < N; ++k) to[k] = run.get(k);
}

// Call body.run<N>(start) for all `count` elements, N at a time, from the first aligned element of `aligned` on (the
// array whose loads or stores matter most), and body.run<1>(start) for the elements before and after. This is thread
// `first` of `step`.
template <u32 N, class T, class Body>
__device__ inline void each_run(const T *aligned, u64 count, u64 first, u64 step, const Body &body) {
    u64 head = (0 - (u64)aligned) % (N * sizeof(T)) / sizeof(T);
    if (head > count) head = count;
    u64 runs = (count - head) / N, singles = count - runs * N;
    for (u64 i = first; i < runs; i += step) body.template run<N>(head + i * N);
    if constexpr (N > 1) {
        for (u64 i = first; i < singles; i += step) body.template run<1>(i < head ? i : i + runs * N);
    }
}

// A body that copies.
template <class T>
struct Copying {
    const T *source;
    T *target;

    template <u32 N>
    __device__ void run(u64 start) const {
        write(target + start, read<T, N>(source + start));
    }
};

template <u32 N, class T, class Body>
__device__ inline void each_run(const T *aligned, u64 count, const Body &body) {
    each_run<N>(aligned, count, thread(), threads(), body);
}
