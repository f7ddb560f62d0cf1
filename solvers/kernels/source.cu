// The element-wise work of the sub-problems, fused. Each kernel's mathematics stands at the function
// of solvers/kernels that computes the same in torch. Needs no header, so NVRTC compiles it as it
// is; the tests compile it as C++, too, and run it thread by thread.
//
// All values are computed in float, in the order of memory. Sums are deterministic: a grid of a size
// that depends on the tensor alone leaves one partial sum for each block, and `finish` adds those in
// order.

constexpr int THREADS = 256;

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };

__device__ inline unsigned as_bits(float value) {
    union { float f; unsigned u; } both;
    both.f = value;
    return both.u;
}

__device__ inline float as_value(unsigned bits) {
    union { float f; unsigned u; } both;
    both.u = bits;
    return both.f;
}

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bfloat16 x) { return as_value(static_cast<unsigned>(x.bits) << 16); }

__device__ inline float widen(float16 x) {
    const unsigned sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    if (rest >= 0x7c00u) return as_value(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    // a subnormal's bits are a whole number of 2^-24; as a float they may be flushed to zero
    if (rest < 0x400u) return as_value(sign | as_bits(static_cast<float>(rest) * 0x1p-24f));
    // as a float its exponent is 112 too small; the product is exact
    return as_value(sign | as_bits(as_value(rest << 13) * 0x1p112f));
}

template <typename T> __device__ T narrow(float x);

template <> __device__ inline float narrow<float>(float x) { return x; }

// to nearest, ties to even
template <> __device__ inline bfloat16 narrow<bfloat16>(float x) {
    const unsigned bits = as_bits(x);
    if (x != x) return {static_cast<unsigned short>(bits >> 16 | 0x40u)};
    return {static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

template <> __device__ inline float16 narrow<float16>(float x) {
    const unsigned bits = as_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    unsigned half;
    if (size > 0x7f800000u) {
        half = 0x7e00u;
    } else if (size >= 0x477ff000u) {  // rounds to 65536 or more
        half = 0x7c00u;
    } else if (size < 0x38800000u) {  // subnormal: the float addition rounds
        half = as_bits(as_value(size) + 0.5f) - 0x3f000000u;
    } else {
        half = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    }
    return {static_cast<unsigned short>(sign | half)};
}

template <typename T> __device__ float rounded(float x) { return widen(narrow<T>(x)); }

template <typename T, int V> struct alignas(sizeof(T) * V) Vector { T at[V]; };

template <int V, typename T>
__device__ inline void load(float (&into)[V], const T* from, long long vector) {
    const Vector<T, V> raw = reinterpret_cast<const Vector<T, V>*>(from)[vector];
#pragma unroll
    for (int v = 0; v < V; ++v) into[v] = widen(raw.at[v]);
}

template <int V, typename T>
__device__ inline void save(T* to, long long vector, const float (&values)[V]) {
    Vector<T, V> raw;
#pragma unroll
    for (int v = 0; v < V; ++v) raw.at[v] = narrow<T>(values[v]);
    reinterpret_cast<Vector<T, V>*>(to)[vector] = raw;
}

__device__ inline long long first_index() {
    return static_cast<long long>(blockIdx.x) * THREADS + threadIdx.x;
}

__device__ inline long long stride() { return static_cast<long long>(gridDim.x) * THREADS; }

// partial[S][blocks]: this block's sums over its threads
template <int S> __device__ void sum_up(const float (&mine)[S], float* partial) {
    __shared__ float sums[S][THREADS];
    for (int s = 0; s < S; ++s) sums[s][threadIdx.x] = mine[s];
    for (int width = THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width)
            for (int s = 0; s < S; ++s) sums[s][threadIdx.x] += sums[s][threadIdx.x + width];
    }
    if (threadIdx.x == 0)
        for (int s = 0; s < S; ++s) partial[s * gridDim.x + blockIdx.x] = sums[s][0];
}

// out[s] = sum of partial[s][0..blocks), one block for each s
__global__ void finish(const float* partial, int blocks, float* out) {
    __shared__ double sums[THREADS];
    double mine = 0;
    for (int b = threadIdx.x; b < blocks; b += THREADS) mine += partial[blockIdx.x * blocks + b];
    sums[threadIdx.x] = mine;
    for (int width = THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(sums[0]);
}

// ---- couple: loss, p_out, (||r||^2, ||x||^2)

__device__ inline float couple_one(
    float y, float lam, float kappa, float beta, float samples, float (&sums)[3]) {
    const float r = lam - y;
    sums[0] += beta * r * r + kappa * r;
    sums[1] += r * r;
    sums[2] += y * y;
    return -(2 * beta * r + kappa) / samples;
}

template <typename X, typename T, int V>
__global__ void couple(
    const X* x, const T* lam, const T* kappa, long long vectors, float beta, float samples, X* p,
    float* partial) {
    float sums[3] = {0, 0, 0};
    for (long long i = first_index(); i < vectors; i += stride()) {
        float y[V], l[V], k[V] = {};
        load<V>(y, x, i);
        load<V>(l, lam, i);
        if (kappa) load<V>(k, kappa, i);
#pragma unroll
        for (int v = 0; v < V; ++v) y[v] = couple_one(y[v], l[v], k[v], beta, samples, sums);
        save<V>(p, i, y);
    }
    sum_up<3>(sums, partial);
}

// ---- step: lam', kappa', (||lam' - x||^2, ||2 beta (lam' - lam)||^2)

enum Set { FREE, BOX, QUANTIZED, SIGN };

// P(z); `spacing` is that of the values that Z may take
__device__ inline float project(float z, int set, float low, float high, float spacing) {
    if (set == FREE || z != z) return z;
    if (set == SIGN) return z >= 0 ? 1.0f : -1.0f;
    z = z < low ? low : z > high ? high : z;
    return set == QUANTIZED ? rintf((z - low) / spacing) * spacing + low : z;
}

template <typename X, typename T, int V>
__global__ void step(
    const T* lam, const X* x, const T* kappa, const float* p, long long vectors, float beta,
    float eta, float ascent, int set, float low, float high, float spacing, T* new_lam,
    T* new_kappa, float* partial) {
    float sums[2] = {0, 0};
    for (long long i = first_index(); i < vectors; i += stride()) {
        float l[V], y[V], k[V] = {}, q[V];
        load<V>(l, lam, i);
        load<V>(y, x, i);
        load<V>(q, p, i);
        if (kappa) load<V>(k, kappa, i);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const float moved = l[v] - eta * (q[v] + (2 * beta * (l[v] - y[v]) + k[v]));
            const float held = project(moved, set, low, high, spacing);
            const float change = 2 * beta * (held - l[v]);
            l[v] = rounded<T>(held);
            const float r = l[v] - y[v];
            k[v] += ascent * r;
            sums[0] += r * r;
            sums[1] += change * change;
        }
        save<V>(new_lam, i, l);
        if (kappa) save<V>(new_kappa, i, k);
    }
    sum_up<2>(sums, partial);
}

// ---- limit of step for a large beta: lam' = x, kappa', (0, ||2 beta (lam' - lam)||^2)

template <typename X, typename T, int V>
__global__ void limit(
    const T* lam, const X* x, const T* kappa, const float* p, long long vectors, float beta,
    float rate, T* new_lam, T* new_kappa, float* partial) {
    float sums[2] = {0, 0};
    for (long long i = first_index(); i < vectors; i += stride()) {
        float l[V], y[V], k[V], q[V];
        load<V>(l, lam, i);
        load<V>(y, x, i);
        load<V>(k, kappa, i);
        load<V>(q, p, i);
#pragma unroll
        for (int v = 0; v < V; ++v) {
            const float change = 2 * beta * (y[v] - l[v]);
            sums[1] += change * change;
            k[v] = (1 - rate) * k[v] - rate * q[v];
        }
        save<V>(new_lam, i, y);
        save<V>(new_kappa, i, k);
    }
    sum_up<2>(sums, partial);
}
