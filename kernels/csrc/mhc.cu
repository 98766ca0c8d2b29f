// Hyper-connection boundary in one launch: see kernels/mhc.py for the formulas.
//
// A cluster of CLUSTER blocks takes TOKENS tokens; each block has its share of the channels of all
// four streams, keeps the new streams in shared memory, and learns the other blocks' partial sums
// through theirs, added in rank order: once for the products, once for the norm.
//
// Build with D, CLUSTER, TOKENS, DOTS (24, or 4 at the end of the model), COMBINE, Y_TYPE,
// FN_SHARED (fetch fn into shared memory before anything else), WITH_FP16, WITH_CODES.
#include "device.cuh"

constexpr int THREADS = 256, CH = D / CLUSTER, SLOTS = 32, VECTORS = CH / 8;
constexpr float EPS = 1e-6f;
constexpr int FN_BYTES = FN_SHARED ? DOTS * 4 * CH * 4 : 0;
constexpr int X_AT = FN_BYTES, U_AT = X_AT + TOKENS * 4 * CH * 2, PARTS_AT = U_AT + TOKENS * CH * 4;
constexpr int MIX_AT = PARTS_AT + TOKENS * SLOTS * 4, SQUARES_AT = MIX_AT + TOKENS * SLOTS * 4;
constexpr int WARP_AT = SQUARES_AT + TOKENS * 4 + 16;  // sums of squares by warp
constexpr int ROWS = (DOTS + 7) / 8;  // products a warp
constexpr int AT_ONCE = THREADS / VECTORS, SUMS = (VECTORS + 31) / 32;  // tokens; sums of one token
static_assert(CH % 128 == 0 && CH <= 2048, "channels of a block");

DEVICE float sum_lanes(float v) {
  UNROLL for (int mask = 16; mask; mask /= 2) v += lane_xor(v, mask);
  return v;
}
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_(-x)); }

// The 4 x 4 mixing matrix of one token, in one thread's registers.
DEVICE void sinkhorn(const float* m, float rho, float scale, const float* base, float* c) {
  UNROLL for (int j = 0; j < 4; j++) {
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = m[8 + 4 * j + k] * rho * scale + base[8 + 4 * j + k];
    const float top = maximum(maximum(c[4 * j], c[4 * j + 1]), maximum(c[4 * j + 2], c[4 * j + 3]));
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = exp_(c[4 * j + k] - top);
    const float inverse = 1.0f / ((c[4 * j] + c[4 * j + 1]) + (c[4 * j + 2] + c[4 * j + 3]));
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = c[4 * j + k] * inverse + EPS;
  }
  for (int round = 0; round < 20; round++) {
    if (round > 0) {
      UNROLL for (int j = 0; j < 4; j++) {
        const float inverse = 1.0f / ((c[4 * j] + c[4 * j + 1]) + (c[4 * j + 2] + c[4 * j + 3]) + EPS);
        UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] *= inverse;
      }
    }
    UNROLL for (int k = 0; k < 4; k++) {
      const float inverse = 1.0f / ((c[k] + c[4 + k]) + (c[8 + k] + c[12 + k]) + EPS);
      UNROLL for (int j = 0; j < 4; j++) c[4 * j + k] *= inverse;
    }
  }
}

// Two blocks a multiprocessor where their shared memory allows it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = WARP_AT > 48 * 1024 ? 1 : 2;
#else
constexpr int BLOCKS = WARP_AT > 110 * 1024 ? 1 : 2;
#endif

KERNEL(THREADS, BLOCKS)
boundary_kernel(const u8* x, const u8* y, float* post, float* comb, const float* fn, const float* base,
                const float* scale, const u16* norm, u8* streams, u16* out, u16* out16, u8* codes,
                float* factors, int tokens) {
  SHARED_BYTES(shared);
  let_next_start();
  const int thread = thread_id(), warp = thread / 32, lane = thread % 32;
  const int rank = cluster_rank(), first = block_x() / CLUSTER * TOKENS, channel0 = rank * CH;
  const int live = min_(TOKENS, tokens - first);
  if (FN_SHARED) {
    for (int i = thread; i < DOTS * 4 * CH / 4; i += THREADS)
      copy16_async(shared + i * 16, fn + (i64)(i / (CH / 4)) * D + channel0 + i % (CH / 4) * 4);
    copies_commit();
  }
  await_previous();  // fn does not depend on it, everything below does

  // New streams of this block's channels: a thread has eight channels of one token's four streams.
  u8* kept = shared + X_AT;
  float* warp_sums = (float*)(shared + WARP_AT);  // [token][8]
  UNROLL for (int base = 0; base < TOKENS; base += AT_ONCE) {
    const int token = base + thread / VECTORS, at = thread % VECTORS * 8;
    const bool inside = token < live;
    const i64 t = first + (inside ? token : 0);
    Vec4 old[4];
    UNROLL for (int j = 0; j < 4; j++) old[j] = load16(x + ((t * 4 + j) * D + channel0 + at) * 2);
    float v[8], squares = 0.0f;
    if (COMBINE) {
      const u8* from = y + (t * D + channel0 + at) * Element<Y_TYPE>::BYTES;
      Element<Y_TYPE>::unpack(load16(from), v);
      if (Y_TYPE == 0) Element<0>::unpack(load16(from + 16), v + 4);
    }
    UNROLL for (int k = 0; k < 4; k++) {
      Vec4 packed = old[k];
      if (COMBINE) {
        const float p = post[t * 4 + k];
        float s[8];
        UNROLL for (int n = 0; n < 8; n++) s[n] = p * v[n];
        UNROLL for (int j = 0; j < 4; j++) {
          const float c = comb[t * 16 + 4 * j + k];
          float stream[8];
          Element<1>::unpack(old[j], stream);
          UNROLL for (int n = 0; n < 8; n++) s[n] += c * stream[n];
        }
        packed = {pack_bf16x2(s[0], s[1]), pack_bf16x2(s[2], s[3]), pack_bf16x2(s[4], s[5]),
                  pack_bf16x2(s[6], s[7])};
      }
      float s[8];
      Element<1>::unpack(packed, s);
      UNROLL for (int n = 0; n < 8; n++) squares += s[n] * s[n];
      if (inside && token < TOKENS) *(Vec4*)(kept + ((token * 4 + k) * CH + at) * 2) = packed;
    }
    UNROLL for (int mask = (VECTORS < 32 ? VECTORS : 32) / 2; mask; mask /= 2) squares += lane_xor(squares, mask);
    if (inside && token < TOKENS && thread % (VECTORS < 32 ? VECTORS : 32) == 0)
      warp_sums[token * 8 + thread % VECTORS / 32] = squares;
  }
  if (FN_SHARED) copies_wait<0>();
  sync_block();
  if (COMBINE) {  // x may be streams: every element was read by this block before it is written
    for (int i = thread; i < live * 4 * VECTORS; i += THREADS) {
      const i64 row = (i64)first * 4 + i / VECTORS;
      store16(streams + (row * D + channel0 + i % VECTORS * 8) * 2, *(const Vec4*)(kept + i * 16));
    }
  }
  // Products: a warp has ROWS rows of fn, a lane four channels at a time.
  float* parts = (float*)(shared + PARTS_AT);
  float acc[ROWS][TOKENS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < TOKENS; n++) acc[r][n] = 0.0f;
  }
  for (int i = lane; i < CH; i += 32) {  // in units of four channels of the four streams
    const int k = i / (CH / 4), at = i % (CH / 4) * 4;
    float w[ROWS][4];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int m = warp + 8 * r;
      if (m >= DOTS) continue;
      const Vec4 f = FN_SHARED ? *(const Vec4*)(shared + ((m * 4 + k) * CH + at) * 4)
                               : load16(fn + (i64)(m * 4 + k) * D + channel0 + at);
      Element<0>::unpack(f, w[r]);
    }
    UNROLL for (int n = 0; n < TOKENS; n++) {
      if (n >= live) continue;
      const Vec2 pair = *(const Vec2*)(kept + ((n * 4 + k) * CH + at) * 2);
      const float v[4] = {bf16_low(pair.x), bf16_high(pair.x), bf16_low(pair.y), bf16_high(pair.y)};
      UNROLL for (int r = 0; r < ROWS; r++) {
        if (warp + 8 * r >= DOTS) continue;
        UNROLL for (int j = 0; j < 4; j++) acc[r][n] += w[r][j] * v[j];
      }
    }
  }
  UNROLL for (int n = 0; n < TOKENS; n++) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      const float sum = sum_lanes(acc[r][n]);
      if (lane == 0 && warp + 8 * r < DOTS) parts[n * SLOTS + warp + 8 * r] = sum;
    }
  }
  if (thread < live) {
    float sum = 0.0f;
    UNROLL for (int w = 0; w < SUMS; w++) sum += warp_sums[thread * 8 + w];
    parts[thread * SLOTS + 24] = sum;
  }
  if (CLUSTER > 1) sync_cluster();
  else sync_block();
  float* mix = (float*)(shared + MIX_AT);
  for (int i = thread; i < live * SLOTS; i += THREADS) {
    const int m = i % SLOTS;
    if (m >= DOTS && m != 24) continue;
    float sum = 0.0f;
    UNROLL for (int s = 0; s < CLUSTER; s++) sum += CLUSTER > 1 ? peer_load(parts + i, s) : parts[i];
    mix[i] = sum;
  }
  sync_block();

  // The last warp makes the next site's values, token n at rank n % CLUSTER, while the others
  // collapse; it has arrived at their next meeting before it begins.
  constexpr int WORKERS = DOTS == 24 ? 224 : 256;
  float* u = (float*)(shared + U_AT);
  float* squares = (float*)(shared + SQUARES_AT);
  for (int n = 0; n < live && thread < WORKERS; n++) {
    const float* m = mix + n * SLOTS;
    const float rho = rsqrt_(m[24] / (4 * D) + EPS);
    float pre[4], sum = 0.0f;
    UNROLL for (int j = 0; j < 4; j++) pre[j] = sigmoid(m[j] * rho * scale[0] + base[j]) + EPS;
    for (int i = thread; i < CH / 2; i += WORKERS) {
      float low = 0.0f, high = 0.0f;
      UNROLL for (int j = 0; j < 4; j++) {
        const u32 pair = *(const u32*)(kept + ((n * 4 + j) * CH + i * 2) * 2);
        low += pre[j] * bf16_low(pair), high += pre[j] * bf16_high(pair);
      }
      const u32 rounded = pack_bf16x2(low, high);
      low = bf16_low(rounded), high = bf16_high(rounded);
      u[n * CH + i * 2] = low, u[n * CH + i * 2 + 1] = high;
      sum += low * low + high * high;
    }
    sum = sum_lanes(sum);
    if (lane == 0) warp_sums[n * 8 + warp] = sum;
  }
  if (thread < WORKERS) {
    sync_some(1, WORKERS);
    if (thread < live) {
      float sum = 0.0f;
      UNROLL for (int w = 0; w < WORKERS / 32; w++) sum += warp_sums[thread * 8 + w];
      squares[thread] = sum;
    }
    cluster_arrive();
  } else {
    cluster_arrive();
    if (lane < live && lane % CLUSTER == rank) {
      const float* m = mix + lane * SLOTS;
      const float rho = rsqrt_(m[24] / (4 * D) + EPS);
      const i64 t = first + lane;
      float c[16];
      UNROLL for (int k = 0; k < 4; k++)
        post[t * 4 + k] = 2.0f * sigmoid(m[4 + k] * rho * scale[1] + base[4 + k]);
      sinkhorn(m, rho, scale[2], base, c);
      UNROLL for (int k = 0; k < 16; k++) comb[t * 16 + k] = c[k];
    }
    sync_warp();
  }
  cluster_wait();
  // RMSNorm, and the linears' e4m3 codes: sixteen threads have one group of 128 channels.
  for (int i = thread; i < (live * VECTORS + 31) / 32 * 32; i += THREADS) {  // whole warps
    const bool inside = i < live * VECTORS;
    const int n = inside ? i / VECTORS : 0, at = i % VECTORS * 8;
    const i64 t = first + n;
    float sum = 0.0f;
    UNROLL for (int s = 0; s < CLUSTER; s++) sum += CLUSTER > 1 ? peer_load(squares + n, s) : squares[n];
    const float rms = rsqrt_(sum / D + EPS);
    float v[8], w[8];
    Element<1>::unpack(load16(norm + channel0 + at), w);
    UNROLL for (int j = 0; j < 8; j++) v[j] = u[n * CH + at + j] * rms * w[j];
    const Vec4 packed = {pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]),
                         pack_bf16x2(v[6], v[7])};
    if (inside) store16(out + t * D + channel0 + at, packed);
    Element<1>::unpack(packed, v);
    if (WITH_FP16 && inside)
      store16(out16 + t * D + channel0 + at, {pack_f16x2(v[0], v[1]), pack_f16x2(v[2], v[3]),
                                              pack_f16x2(v[4], v[5]), pack_f16x2(v[6], v[7])});
    if (WITH_CODES) {
      float most = 0.0f;
      UNROLL for (int j = 0; j < 8; j++) most = maximum(most, v[j] < 0.0f ? -v[j] : v[j]);
      UNROLL for (int mask = 8; mask; mask /= 2) most = maximum(most, lane_xor(most, mask));
      const u32 exponent = (as_bits(maximum(most, 1e-4f) * (1.0f / 448.0f)) + 0x7FFFFFu) >> 23;
      const float inverse = as_float((254u - exponent) << 23);
      if (!inside) continue;
      u16 code[4];
      UNROLL for (int j = 0; j < 4; j++) code[j] = pack_e4m3x2(v[2 * j] * inverse, v[2 * j + 1] * inverse);
      *(Vec2*)(codes + t * D + channel0 + at) = {code[0] | (u32)code[1] << 16, code[2] | (u32)code[3] << 16};
      if (i % 16 == 0) factors[(i64)((channel0 + at) / 128) * tokens + t] = as_float(exponent << 23);
    }
  }
  if (CLUSTER > 1) sync_cluster();  // no block ends while another reads its memory
}
HOST_ENTRY(boundary_kernel)
