// Packing all arrays of a bucket into one flat buffer in one launch, and back.
//
// flat_buffer_kernels.py launches these kernels and describes their arguments. The
// arithmetic is that of communicators/flat_buffer.py, bit for bit but for the payload
// of a NaN.
//
// Needs no header, so that NVRTC compiles it as it is; C++14. Without a GPU it is
// compiled as host C++: nothing here synchronises threads or shares memory among them.

namespace {

typedef long long Index;  // positions in buffers pass 2^31
typedef unsigned long long Bits64;

// Threads of a block, and elements of the flat buffer that a block takes at a time. The
// tile is a multiple of what the threads move at once, and small enough that a bucket
// of a few MB is divided among all multiprocessors. The launch knows both.
const int kThreads = 256;
const int kTile = 2048;
const int kVectorBytes = 16;

// A row of the pointer table.
const int kPointer = 0;
const int kLength = 1;
const int kOffset = 2;
const int kType = 3;
const int kRowLength = 4;

// Type codes; 0 stands for the type of the buffer, copied as it is.
const Index kFloat16 = 1;
const Index kBFloat16 = 2;
const Index kFloat32 = 3;
const Index kFloat64 = 4;

struct Float16 {
  unsigned short bits;
};

struct BFloat16 {
  unsigned short bits;
};

// ---- Conversions: exact to a wider type, to the nearest (ties to even) to a narrower
// one. On the device, float arithmetic is spelled in PTX: CuPy compiles with -ftz=true,
// which would flush subnormal numbers in plain C++.

union FloatBits {
  float value;
  unsigned int bits;
};

union DoubleBits {
  double value;
  Bits64 bits;
};

// Round a double to a 16-bit format with as many bits of exponent and of fraction.
template <int kExponent, int kFraction>
__device__ inline unsigned short round_bits(double value) {
  DoubleBits in;
  in.value = value;
  const unsigned short sign = (unsigned short)(in.bits >> 63 << 15);
  const Bits64 magnitude = in.bits & ~(1ULL << 63);
  const int biased = (int)(magnitude >> 52);
  const int largest = (1 << kExponent) - 1;
  const unsigned short infinity = (unsigned short)(largest << kFraction);
  if (magnitude > 0x7FFULL << 52) {
    return (unsigned short)(sign | infinity | 1 << (kFraction - 1));
  }
  const int exponent = biased - 1023 + (1 << (kExponent - 1)) - 1;
  if (exponent >= largest) {
    return (unsigned short)(sign | infinity);
  }
  // A subnormal result loses one bit more for each step below the smallest exponent.
  const int shift = 52 - kFraction + (exponent > 0 ? 0 : 1 - exponent);
  if (shift > 53) {
    return sign;  // below half of the smallest number
  }
  const Bits64 significand = (magnitude & ((1ULL << 52) - 1)) | 1ULL << 52;
  const Bits64 rest = significand & ((1ULL << shift) - 1);
  const Bits64 half = 1ULL << (shift - 1);
  Bits64 rounded = significand >> shift;
  rounded += rest > half || (rest == half && (rounded & 1));
  // The leading bit, and a carry out of the fraction, count into the exponent.
  const int below = exponent > 0 ? (exponent - 1) << kFraction : 0;
  return (unsigned short)(sign | (below + (int)rounded));
}

__device__ inline void widen(float value, float *out) { *out = value; }

__device__ inline void widen(double value, double *out) { *out = value; }

__device__ inline void widen(BFloat16 value, float *out) {
  FloatBits wide;
  wide.bits = (unsigned int)value.bits << 16;
  *out = wide.value;
}

__device__ inline void widen(Float16 value, float *out) {
#ifdef __CUDA_ARCH__
  asm("cvt.f32.f16 %0, %1;" : "=f"(*out) : "h"(value.bits));
#else
  const unsigned int exponent = value.bits >> 10 & 31;
  const unsigned int fraction = value.bits & 1023;
  FloatBits wide;
  if (exponent == 31) {
    wide.bits = 0x7F800000u | fraction << 13;
  } else if (exponent > 0) {
    wide.bits = (exponent + 112) << 23 | fraction << 13;
  } else {
    wide.value = (float)fraction * (1.0f / (1 << 24));
  }
  wide.bits |= (unsigned int)(value.bits >> 15) << 31;
  *out = wide.value;
#endif
}

template <class T>
__device__ inline void widen(T value, double *out) {
  float wide;
  widen(value, &wide);
#ifdef __CUDA_ARCH__
  asm("cvt.f64.f32 %0, %1;" : "=d"(*out) : "f"(wide));
#else
  *out = wide;
#endif
}

__device__ inline void round_to(float value, float *out) { *out = value; }

__device__ inline void round_to(double value, double *out) { *out = value; }

__device__ inline void round_to(double value, float *out) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(*out) : "d"(value));
#else
  *out = (float)value;
#endif
}

__device__ inline void round_to(float value, Float16 *out) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(value));
#else
  out->bits = round_bits<5, 10>(value);
#endif
}

__device__ inline void round_to(double value, Float16 *out) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(out->bits) : "d"(value));
#else
  out->bits = round_bits<5, 10>(value);
#endif
}

// PTX has this conversion from sm_80 on only.
__device__ inline void round_to(float value, BFloat16 *out) {
  FloatBits in;
  in.value = value;
  if ((in.bits & 0x7FFFFFFFu) > 0x7F800000u) {
    out->bits = (unsigned short)(in.bits >> 16 | 0x40);
  } else {
    out->bits = (unsigned short)((in.bits + 0x7FFFu + (in.bits >> 16 & 1)) >> 16);
  }
}

__device__ inline void round_to(double value, BFloat16 *out) {
  out->bits = round_bits<8, 7>(value);
}

__device__ inline float multiply(float a, float b) {
#ifdef __CUDA_ARCH__
  float out;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
#else
  return a * b;
#endif
}

__device__ inline double multiply(double a, double b) { return a * b; }

// ---- What happens to one element: cast from S to D, scaled before that.

// float64 on either side is multiplied in float64, all else in float32.
template <class S, class D>
struct Wide {
  typedef float Type;
};
template <class S>
struct Wide<S, double> {
  typedef double Type;
};
template <class D>
struct Wide<double, D> {
  typedef double Type;
};
template <>
struct Wide<double, double> {
  typedef double Type;
};

template <class S, class D, bool kScaled>
struct Cast {
  typedef S From;
  typedef D To;
  typename Wide<S, D>::Type factor;

  __device__ explicit Cast(double scale) { round_to(scale, &factor); }

  __device__ D operator()(S value) const {
    typename Wide<S, D>::Type wide;
    widen(value, &wide);
    if (kScaled) {
      wide = multiply(wide, factor);
    }
    D out;
    round_to(wide, &out);
    return out;
  }
};

template <class T>
struct Cast<T, T, false> {
  typedef T From;
  typedef T To;

  __device__ explicit Cast(double) {}

  __device__ T operator()(T value) const { return value; }
};

// ---- Whole tiles: accesses as wide as the addresses allow, at most 16 bytes.

template <class T, int kLanes>
struct alignas(sizeof(T) * kLanes) Vector {
  T lanes[kLanes];

  __device__ static bool fits(const T *pointer) {
    return reinterpret_cast<Bits64>(pointer) % sizeof(Vector) == 0;
  }
};

// Neighbouring threads take neighbouring vectors. All loads come before the first
// store, so that they are in flight together.
template <int kLanes>
struct Tile {
  static const int kSteps = kTile / (kThreads * kLanes);

  template <class Op>
  __device__ static void move(const typename Op::From *from, typename Op::To *to,
                              const Op &op) {
    typedef Vector<typename Op::From, kLanes> In;
    typedef Vector<typename Op::To, kLanes> Out;
    if (kLanes > 1 && !(In::fits(from) && Out::fits(to))) {
      Tile<kLanes / 2>::move(from, to, op);
      return;
    }
    In in[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      in[step] = reinterpret_cast<const In *>(from)[step * kThreads + threadIdx.x];
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Out out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        out.lanes[lane] = op(in[step].lanes[lane]);
      }
      reinterpret_cast<Out *>(to)[step * kThreads + threadIdx.x] = out;
    }
  }

  template <class T>
  __device__ static void clear(T *to) {
    typedef Vector<T, kLanes> Out;
    if (kLanes > 1 && !Out::fits(to)) {
      Tile<kLanes / 2>::clear(to);
      return;
    }
    const Out zeros = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      reinterpret_cast<Out *>(to)[step * kThreads + threadIdx.x] = zeros;
    }
  }
};

// Ends the recursion for the compiler; a single lane always fits.
template <>
struct Tile<0> {
  template <class Op>
  __device__ static void move(const typename Op::From *, typename Op::To *,
                              const Op &) {}
  template <class T>
  __device__ static void clear(T *) {}
};

// Bytes have no more lanes than a tile has elements for each thread.
template <int kItemBytes>
struct Widest : Tile<(kVectorBytes / kItemBytes < kTile / kThreads
                          ? kVectorBytes / kItemBytes
                          : kTile / kThreads)> {};

template <class Op>
__device__ inline void move_tile(const typename Op::From *from, typename Op::To *to,
                                 const Op &op) {
  const int item_bytes = sizeof(*from) > sizeof(*to) ? sizeof(*from) : sizeof(*to);
  Widest<item_bytes>::move(from, to, op);
}

// ---- The two ways. A is the type of an array, W that of the buffer.

template <class W, bool kScaled>
struct Packing {
  double scale;

  template <class A>
  __device__ void tile(A *array, W *buffer) const {
    move_tile(array, buffer, Cast<A, W, kScaled>(scale));
  }
  template <class A>
  __device__ void element(A *array, W *buffer) const {
    *buffer = Cast<A, W, kScaled>(scale)(*array);
  }
  __device__ void absent_tile(W *buffer) const {
    Widest<sizeof(W)>::clear(buffer);
  }
  __device__ void absent_element(W *buffer) const { *buffer = W(); }
};

template <class W>
struct Unpacking {
  template <class A>
  __device__ void tile(A *array, W *buffer) const {
    move_tile(buffer, array, Cast<W, A, false>(1));
  }
  template <class A>
  __device__ void element(A *array, W *buffer) const {
    *array = Cast<W, A, false>(1)(*buffer);
  }
  __device__ void absent_tile(W *) const {}
  __device__ void absent_element(W *) const {}
};

// What one element of the buffer belongs to.
struct Place {
  Index row;       // last row that begins at or before the element; -1: none
  Index pointer;   // of the array; 0: absent, or the element is padding
  Index position;  // in the array
  Index type;
};

// Rows are in the order of their offsets; the one sought lies in [low, high), or
// before low where it is low - 1. Empty arrays share the offset of the next row.
__device__ inline Place find(const Index *table, Index low, Index high,
                             Index element) {
  while (low < high) {
    const Index middle = low + (high - low) / 2;
    if (table[middle * kRowLength + kOffset] <= element) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  Place place = {low - 1, 0, 0, 0};
  if (place.row >= 0) {
    const Index *row = table + place.row * kRowLength;
    place.position = element - row[kOffset];
    place.pointer = place.position < row[kLength] ? row[kPointer] : 0;
    place.type = row[kType];
  }
  return place;
}

template <class A, class W, class Way>
__device__ inline void visit_as(const Place &place, W *buffer, const Way &way,
                                bool is_tile) {
  A *array = reinterpret_cast<A *>(place.pointer) + place.position;
  if (is_tile) {
    way.tile(array, buffer);
  } else {
    way.element(array, buffer);
  }
}

// The buffers of integers and the like: arrays have the type of the buffer.
template <class W>
struct Visit {
  template <class Way>
  __device__ static void run(const Place &place, W *buffer, const Way &way,
                             bool is_tile) {
    visit_as<W>(place, buffer, way, is_tile);
  }
};

template <class W>
struct VisitFloats {
  template <class Way>
  __device__ static void run(const Place &place, W *buffer, const Way &way,
                             bool is_tile) {
    switch (place.type) {
      case kFloat16:
        visit_as<Float16>(place, buffer, way, is_tile);
        break;
      case kBFloat16:
        visit_as<BFloat16>(place, buffer, way, is_tile);
        break;
      case kFloat32:
        visit_as<float>(place, buffer, way, is_tile);
        break;
      case kFloat64:
        visit_as<double>(place, buffer, way, is_tile);
        break;
    }
  }
};

template <>
struct Visit<Float16> : VisitFloats<Float16> {};
template <>
struct Visit<BFloat16> : VisitFloats<BFloat16> {};
template <>
struct Visit<float> : VisitFloats<float> {};
template <>
struct Visit<double> : VisitFloats<double> {};

// Each block takes every gridDim-th tile of the buffer, whatever the arrays' sizes. A
// tile that lies in one array goes the fast way; in one with borders of arrays, each
// thread finds the array of each of its elements.
template <class W, class Way>
__device__ inline void run(const Index *table, Index n_rows, W *buffer, Index n_elems,
                           const Way &way) {
  for (Index start = (Index)blockIdx.x * kTile; start < n_elems;
       start += (Index)gridDim.x * kTile) {
    const Index stop = n_elems - start < kTile ? n_elems : start + kTile;
    const Place first = find(table, 0, n_rows, start);
    const Place last = find(table, first.row + 1, n_rows, stop - 1);
    if (stop - start == kTile && first.row == last.row &&
        first.pointer == last.pointer) {
      if (first.pointer != 0) {
        Visit<W>::run(first, buffer + start, way, true);
      } else {
        way.absent_tile(buffer + start);
      }
      continue;
    }
    Index row = first.row;
    for (Index at = start + threadIdx.x; at < stop; at += kThreads) {
      const Place place = find(table, row + 1, last.row + 1, at);
      row = place.row;
      if (place.pointer != 0) {
        Visit<W>::run(place, buffer + at, way, false);
      } else {
        way.absent_element(buffer + at);
      }
    }
  }
}

}  // namespace

#define PACK(NAME, TYPE, SCALED)                                              \
  extern "C" __global__ void __launch_bounds__(kThreads)                      \
      NAME(const Index *table, Index n_rows, TYPE *buffer, Index n_elems,     \
           double scale) {                                                    \
    run(table, n_rows, buffer, n_elems, Packing<TYPE, SCALED>{scale});        \
  }

#define UNPACK(NAME, TYPE)                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads)                      \
      NAME(const Index *table, Index n_rows, TYPE *buffer, Index n_elems) {   \
    run(table, n_rows, buffer, n_elems, Unpacking<TYPE>());                   \
  }

#define FLOAT_KERNELS(NAME, TYPE)       \
  PACK(pack_##NAME, TYPE, false)        \
  PACK(pack_scaled_##NAME, TYPE, true)  \
  UNPACK(unpack_##NAME, TYPE)

#define RAW_KERNELS(NAME, TYPE)  \
  PACK(pack_##NAME, TYPE, false) \
  UNPACK(unpack_##NAME, TYPE)

FLOAT_KERNELS(float16, Float16)
FLOAT_KERNELS(bfloat16, BFloat16)
FLOAT_KERNELS(float32, float)
FLOAT_KERNELS(float64, double)
RAW_KERNELS(raw1, unsigned char)
RAW_KERNELS(raw2, unsigned short)
RAW_KERNELS(raw4, unsigned int)
RAW_KERNELS(raw8, unsigned long long)
