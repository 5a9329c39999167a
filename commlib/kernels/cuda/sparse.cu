// Write and read sparse payloads, in the layout of kernels/host/sparse.py.
//
// Each position depends on all earlier data, so a payload is written and read in two kernels: the first one adds up the
// contents of each chunk, the second one then knows the start of each chunk.
#include "runs.cuh"
#include "scan.cuh"
#include "values.cuh"

struct List {
    const u32 *indices;   // ascending
    const float *values;  // null: the payload contains them already
    const u32 *number;    // number of elements; null: `most`
    u64 most, span;       // span: elements per chunk
    u32 kind, unused;

    __device__ inline u64 length() const { return number ? *number : most; }
    // Return the number of elements between an element and the previous one.
    __device__ inline u32 gap(u64 i) const { return indices[i] - (i ? indices[i - 1] + 1 : 0); }
};

// Count the gaps and marks of each chunk, with one and with two bytes; and write the values.
extern "C" __global__ void measure(List list, Pair *sums, u8 *payload) {
    u64 length = list.length();
    for (u64 chunk = worker(); chunk * list.span < length; chunk += workers()) {
        u64 stop = (chunk + 1) * list.span < length ? (chunk + 1) * list.span : length;
        u64 narrow = 0, wide = 0;
        for (u64 i = chunk * list.span + lane(); i < stop; i += LANES) {
            narrow += 1 + list.gap(i) / 255;
            wide += 1 + list.gap(i) / 65535;
            if (list.values) store_value(payload, list.kind, i, list.values[i]);
        }
        narrow = all_sum(narrow);
        wide = all_sum(wide);
        if (lane() == 0) write_sums(sums, chunk, {narrow, wide});
    }
}
KERNEL(measure)

__device__ inline void store_unit(u8 *gaps, u32 width, u64 i, u32 unit) {
    if (width == 1) {
        gaps[i] = (u8)unit;
    } else {
        store(gaps + 2 * i, (u16)unit);
    }
}

#define FEW 4u  // number of marks that a lane writes alone; all lanes write more of them together

extern "C" __global__ void write_gaps(List list, const Pair *sums, u8 *payload, u64 *bytes) {
    u64 length = list.length();
    Pair all = sums_before(sums, (length + list.span - 1) / list.span);
    u32 width = all.first <= 2 * all.second ? 1 : 2, mark = width == 1 ? 255 : 65535;
    u8 *gaps = payload + HEADER + value_bytes(list.kind) * length;
    if (thread() == 0) {
        store(payload, (u32)length);
        store(payload + 4, (u16)width);
        store(payload + 6, (u16)list.kind);
        *bytes = (u64)(gaps - payload) + (width == 1 ? all.first : 2 * all.second);
    }
    for (u64 chunk = worker(); chunk * list.span < length; chunk += workers()) {
        u64 stop = (chunk + 1) * list.span < length ? (chunk + 1) * list.span : length;
        Pair before = sums_before(sums, chunk);
        u64 at = width == 1 ? before.first : before.second;
        for (u64 start = chunk * list.span; start < stop; start += LANES) {
            u64 i = start + lane();
            u32 gap = i < stop ? list.gap(i) : 0, marks = gap / mark;
            u64 own = at + all_before(i < stop ? 1 + marks : 0u);
            at += all_sum(i < stop ? 1 + marks : 0u);
            if (i < stop) store_unit(gaps, width, own + marks, gap % mark);
            if (marks <= FEW) {
                for (u32 j = 0; j < marks; ++j) store_unit(gaps, width, own + j, mark);
            }
            for (u32 long_ones = all_bits(marks > FEW); long_ones; long_ones &= long_ones - 1) {
                bool its = lane() == lowest(long_ones);
                u64 first = all_sum(its ? own : 0ull);
                u32 number = all_sum(its ? marks : 0u);
                for (u32 j = lane(); j < number; j += LANES) store_unit(gaps, width, first + j, mark);
            }
        }
    }
}
KERNEL(write_gaps)

struct Payload {
    const u8 *bytes;
    u64 length, chunks;
    u32 kind, unused;
};

// The header of a payload. A unit is a gap, or a mark that belongs to the next gap.
struct Header {
    bool too_short, other_kind;
    u64 number, units, span;
    u32 width, mark;
    const u8 *gaps;

    __device__ inline u32 unit(u64 i) const { return width == 1 ? gaps[i] : load<u16>(gaps + 2 * i); }
};

__device__ inline Header read_header(const Payload &payload) {
    Header header = {};
    header.too_short = payload.length < HEADER;
    if (header.too_short) return header;
    header.width = load<u16>(payload.bytes + 4);
    header.other_kind = load<u16>(payload.bytes + 6) != payload.kind || (header.width != 1 && header.width != 2);
    if (header.other_kind) return header;
    header.mark = header.width == 1 ? 255 : 65535;
    header.number = load<u32>(payload.bytes);
    u64 start = HEADER + value_bytes(payload.kind) * header.number;
    header.gaps = payload.bytes + start;
    header.units = start < payload.length ? (payload.length - start) / header.width : 0;
    header.span = ((header.units + payload.chunks - 1) / payload.chunks + LANES - 1) / LANES * LANES;
    return header;
}

struct Faults {
    u32 outside, too_short, other_kind;  // initially zero
};

struct Clearing {
    float *out;

    template <u32 N>
    __device__ void run(u64 start) const {
        write(out + start, Run<float, N>{});
    }
};

// Add up the units of each chunk, and count the gaps that end in it; write zeros to `out` unless values are added to
// it.
extern "C" __global__ void add_up_gaps(Payload payload, Pair *sums, float *out, u64 count, u32 add) {
    if (!add) each_run<WIDE<float>>(out, count, Clearing{out});
    Header header = read_header(payload);
    for (u64 chunk = worker(); chunk * header.span < header.units; chunk += workers()) {
        u64 stop = (chunk + 1) * header.span < header.units ? (chunk + 1) * header.span : header.units;
        u64 sum = 0;
        u32 ends = 0;
        for (u64 i = chunk * header.span + lane(); i < stop; i += LANES) {
            u32 unit = header.unit(i);
            sum += unit;
            ends += unit != header.mark;
        }
        sum = all_sum(sum);
        ends = all_sum(ends);
        if (lane() == 0) write_sums(sums, chunk, {sum, ends});
    }
}
KERNEL(add_up_gaps)

extern "C" __global__ void read_values(
    Payload payload, const Pair *sums, float *out, u64 count, u32 add, Faults *faults) {
    Header header = read_header(payload);
    if (thread() == 0) {
        faults->other_kind = header.other_kind;
        faults->too_short = header.too_short;
    }
    for (u64 chunk = worker(); chunk * header.span < header.units; chunk += workers()) {
        u64 stop = (chunk + 1) * header.span < header.units ? (chunk + 1) * header.span : header.units;
        Pair before = sums_before(sums, chunk);
        for (u64 start = chunk * header.span; start < stop; start += LANES) {
            u64 at = start + lane();
            u32 unit = at < stop ? header.unit(at) : header.mark;
            bool ends = unit != header.mark;
            u64 i = before.second + all_before((u32)ends);
            u64 index = before.first + all_before(at < stop ? unit : 0u) + unit + i;
            before.second += all_sum((u32)ends);
            before.first += all_sum(at < stop ? unit : 0u);
            if (!ends || i >= header.number) continue;
            if (index >= count) {
                faults->outside = 1;  // a harmless race: all write the same value
                continue;
            }
            float value = load_value(payload.bytes, payload.kind, i);
            out[index] = add ? out[index] + value : value;
        }
    }
    u64 chunks = header.units ? (header.units + header.span - 1) / header.span : 0;
    if (sums_before(sums, chunks).second < header.number && thread() == 0) faults->too_short = 1;
}
KERNEL(read_values)
