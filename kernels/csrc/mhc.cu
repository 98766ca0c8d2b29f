// Hyper-connection boundary in one launch: see kernels/mhc.py for the formulas.
//
// A cluster of CLUSTER blocks takes TOKENS tokens; each block has its share of the channels of all
// four streams and keeps the new streams in shared memory. The blocks meet once: every block sends its
// part of the 24 products, and of the ten products of the streams with each other, into the shared
// memory of all. From those ten follow both norms: the streams' own, and that of the collapsed input,
// whose mean square is pre^T G pre (before its rounding to bf16, which changes it by some 1e-5).
// Everything that depends on no earlier kernel is fetched before waiting for one.
//
// Build with D, CLUSTER, TOKENS, DOTS (24, or 4 at the end of the model), COMBINE, Y_TYPE,
// FN_SHARED (fetch fn into shared memory before anything else), WITH_FP16, WITH_CODES.
#include "device.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, CH = D / CLUSTER, VECTORS = CH / 8;
constexpr int WISHED = CH * TOKENS / THREADS;  // channels of one token that a thread combines
constexpr int PER = WISHED >= 8 && CH >= 256 ? 8 : WISHED >= 4 ? 4 : 2;
constexpr int TEAM = CH / PER, AT_ONCE = THREADS / TEAM;  // threads of a token; tokens
constexpr int GRAM = 10, SLOTS = 36, GRAM_AT = 24;        // of a token: 24 products, then ten
constexpr float EPS = 1e-6f;
constexpr int FN_BYTES = FN_SHARED ? DOTS * 4 * CH * 4 : 0;
constexpr int X_AT = FN_BYTES, RECEIVED_AT = X_AT + TOKENS * 4 * CH * 2;
constexpr int MIX_AT = RECEIVED_AT + CLUSTER * TOKENS * SLOTS * 4, GRAMS_AT = MIX_AT + TOKENS * SLOTS * 4;
constexpr int BASE_AT = GRAMS_AT + TOKENS * WARPS * GRAM * 4, END = BASE_AT + 32 * 4;
constexpr int ROWS = (DOTS + WARPS - 1) / WARPS;  // products a warp
static_assert(CH % 128 == 0 && TEAM % 32 == 0 && TEAM <= THREADS, "channels of a block");

DEVICE float sigmoid(float x) { return reciprocal(1.0f + exp_(-x)); }

// The 4 x 4 mixing matrix of one token, in one thread's registers.
DEVICE void sinkhorn(const float* m, float rho, float scale, const float* base, float* c) {
  UNROLL for (int j = 0; j < 4; j++) {
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = m[8 + 4 * j + k] * rho * scale + base[8 + 4 * j + k];
    const float top = maximum(maximum(c[4 * j], c[4 * j + 1]), maximum(c[4 * j + 2], c[4 * j + 3]));
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = exp_(c[4 * j + k] - top);
    const float inverse = reciprocal((c[4 * j] + c[4 * j + 1]) + (c[4 * j + 2] + c[4 * j + 3]));
    UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] = c[4 * j + k] * inverse + EPS;
  }
  for (int round = 0; round < 20; round++) {
    if (round > 0) {
      UNROLL for (int j = 0; j < 4; j++) {
        const float inverse = reciprocal((c[4 * j] + c[4 * j + 1]) + (c[4 * j + 2] + c[4 * j + 3]) + EPS);
        UNROLL for (int k = 0; k < 4; k++) c[4 * j + k] *= inverse;
      }
    }
    UNROLL for (int k = 0; k < 4; k++) {
      const float inverse = reciprocal((c[k] + c[4 + k]) + (c[8 + k] + c[12 + k]) + EPS);
      UNROLL for (int j = 0; j < 4; j++) c[4 * j + k] *= inverse;
    }
  }
}

// PER bf16 as pairs.
DEVICE void load_pairs(const u8* p, u32* pair) {
  if (PER == 8) {
    const Vec4 v = load16(p);
    pair[0] = v.x, pair[1] = v.y, pair[2 % (PER / 2)] = v.z, pair[3 % (PER / 2)] = v.w;
  } else if (PER == 4) {
    const Vec2 v = *(const Vec2*)p;
    pair[0] = v.x, pair[1 % (PER / 2)] = v.y;
  } else {
    pair[0] = *(const u32*)p;
  }
}
DEVICE void store_pairs(u8* p, const u32* pair) {
  if (PER == 8) *(Vec4*)p = {pair[0], pair[1 % (PER / 2)], pair[2 % (PER / 2)], pair[3 % (PER / 2)]};
  else if (PER == 4) *(Vec2*)p = {pair[0], pair[1 % (PER / 2)]};
  else *(u32*)p = pair[0];
}

// Two blocks a multiprocessor where their shared memory allows it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = END > 48 * 1024 ? 1 : 2;
#else
constexpr int BLOCKS = END > 110 * 1024 ? 1 : 2;
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
  float* site = (float*)(shared + BASE_AT);  // base, then scale
  if (thread < DOTS) site[thread] = base[thread];
  else if (thread >= 32 && thread < 32 + (DOTS == 24 ? 3 : 1)) site[24 + thread - 32] = scale[thread - 32];
  const Vec4 norm8 = load16(norm + channel0 + thread % VECTORS * 8);
  if (CLUSTER > 1) cluster_arrive();  // everybody is there: waited for before the first word is sent
  await_previous();  // all of the above does not depend on it, everything below does

  // New streams of this block's channels: a thread has PER channels of one token's four streams, which
  // nobody else reads, so x may be streams.
  u8* kept = shared + X_AT;
  float* grams = (float*)(shared + GRAMS_AT);  // [token][warp of its team][10]
  UNROLL for (int begin = 0; begin < TOKENS; begin += AT_ONCE) {
    const int token = begin + thread / TEAM, at = thread % TEAM * PER;
    const bool inside = token < live;
    const i64 t = first + (inside ? token : 0);
    u32 old[4][PER / 2];
    float v[PER], p[4], c[16];
    UNROLL for (int j = 0; j < 4; j++) load_pairs(x + ((t * 4 + j) * D + channel0 + at) * 2, old[j]);
    if (COMBINE) {
      const u8* from = y + (t * D + channel0 + at) * Element<Y_TYPE>::BYTES;
      if (Y_TYPE == 1) {
        u32 pair[PER / 2];
        load_pairs(from, pair);
        UNROLL for (int n = 0; n < PER / 2; n++) v[2 * n] = bf16_low(pair[n]), v[2 * n + 1] = bf16_high(pair[n]);
      } else {
        UNROLL for (int n = 0; n < PER / 2; n++) {
          const Vec2 two = *(const Vec2*)(from + n * 8);
          v[2 * n] = as_float(two.x), v[2 * n + 1] = as_float(two.y);
        }
      }
      Element<0>::unpack(load16(post + t * 4), p);
      UNROLL for (int j = 0; j < 4; j++) Element<0>::unpack(load16(comb + t * 16 + 4 * j), c + 4 * j);
    }
    float s[4][PER];
    UNROLL for (int k = 0; k < 4; k++) {
      UNROLL for (int n = 0; n < PER / 2; n++) {
        u32 pair = old[k][n];
        if (COMBINE) {
          float low = p[k] * v[2 * n], high = p[k] * v[2 * n + 1];
          UNROLL for (int j = 0; j < 4; j++) {
            low += c[4 * j + k] * bf16_low(old[j][n]);
            high += c[4 * j + k] * bf16_high(old[j][n]);
          }
          pair = pack_bf16x2(low, high);
        }
        s[k][2 * n] = bf16_low(pair), s[k][2 * n + 1] = bf16_high(pair);
      }
    }
    if (inside) {
      UNROLL for (int k = 0; k < 4; k++) {
        u32 pair[PER / 2];  // exact: these are bf16
        UNROLL for (int n = 0; n < PER / 2; n++) pair[n] = pack_bf16x2(s[k][2 * n], s[k][2 * n + 1]);
        store_pairs(kept + ((token * 4 + k) * CH + at) * 2, pair);
        if (COMBINE) store_pairs(streams + ((t * 4 + k) * D + channel0 + at) * 2, pair);
      }
    }
    float gram[GRAM];
    int place = 0;
    UNROLL for (int j = 0; j < 4; j++) {
      UNROLL for (int k = j; k < 4; k++) {
        float sum = 0.0f;
        UNROLL for (int n = 0; n < PER; n++) sum += s[j][n] * s[k][n];
        gram[place++] = sum;
      }
    }
    UNROLL for (int mask = 16; mask; mask /= 2) {
      UNROLL for (int i = 0; i < GRAM; i++) gram[i] += lane_xor(gram[i], mask);
    }
    if (lane == 0 && inside) {
      UNROLL for (int i = 0; i < GRAM; i++) grams[(token * WARPS + thread % TEAM / 32) * GRAM + i] = gram[i];
    }
  }
  if (FN_SHARED) copies_wait<0>();
  sync_block();
  if (CLUSTER > 1) cluster_wait();

  // Each block's parts go to the place of its rank, in all blocks.
  float* received = (float*)(shared + RECEIVED_AT);  // [rank][token][slot]
  float* own = received + rank * TOKENS * SLOTS;
  for (int i = thread; i < live * GRAM * CLUSTER; i += THREADS) {
    const int target = i % CLUSTER, token = i / CLUSTER / GRAM, which = i / CLUSTER % GRAM;
    float sum = 0.0f;
    UNROLL for (int w = 0; w < TEAM / 32; w++) sum += grams[(token * WARPS + w) * GRAM + which];
    float* place = own + token * SLOTS + GRAM_AT + which;
    if (CLUSTER > 1) peer_store(place, target, sum);
    else *place = sum;
  }
  // Products: a warp has ROWS rows of fn, a lane four channels at a time; tokens that are not there
  // give sums that nobody reads.
  float acc[ROWS][TOKENS];
  UNROLL for (int r = 0; r < ROWS; r++) {
    UNROLL for (int n = 0; n < TOKENS; n++) acc[r][n] = 0.0f;
  }
  UNROLL4 for (int step = 0; step < CH / 32; step++) {  // in units of four channels of the four streams
    const int i = step * 32 + lane, k = i / (CH / 4), at = i % (CH / 4) * 4;
    float w[ROWS][4];
    UNROLL for (int r = 0; r < ROWS; r++) {
      const int m = min_(warp + WARPS * r, DOTS - 1);
      const Vec4 f = FN_SHARED ? *(const Vec4*)(shared + ((m * 4 + k) * CH + at) * 4)
                               : load16(fn + (i64)(m * 4 + k) * D + channel0 + at);
      Element<0>::unpack(f, w[r]);
    }
    UNROLL for (int n = 0; n < TOKENS; n++) {
      const Vec2 pair = *(const Vec2*)(kept + ((n * 4 + k) * CH + at) * 2);
      const float v[4] = {bf16_low(pair.x), bf16_high(pair.x), bf16_low(pair.y), bf16_high(pair.y)};
      UNROLL for (int r = 0; r < ROWS; r++) {
        UNROLL for (int j = 0; j < 4; j++) acc[r][n] += w[r][j] * v[j];
      }
    }
  }
  UNROLL for (int mask = 16; mask; mask /= 2) {
    UNROLL for (int n = 0; n < TOKENS; n++) {
      UNROLL for (int r = 0; r < ROWS; r++) acc[r][n] += lane_xor(acc[r][n], mask);
    }
  }
  UNROLL for (int n = 0; n < TOKENS; n++) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      float* place = own + n * SLOTS + warp + WARPS * r;
      if (warp + WARPS * r >= DOTS || lane >= CLUSTER) continue;
      if (CLUSTER > 1) peer_store(place, lane, acc[r][n]);
      else *place = acc[r][n];
    }
  }
  if (CLUSTER > 1) sync_cluster();  // from here on a block reads its own memory alone
  else sync_block();
  float* mix = (float*)(shared + MIX_AT);
  for (int i = thread; i < live * SLOTS; i += THREADS) {
    const int m = i % SLOTS;
    if ((m >= DOTS && m < GRAM_AT) || m >= GRAM_AT + GRAM) continue;
    float sum = 0.0f;
    UNROLL for (int s = 0; s < CLUSTER; s++) sum += received[s * TOKENS * SLOTS + i];
    mix[i] = sum;
  }
  sync_block();

  // Collapse, RMSNorm, and the linears' e4m3 codes: a thread has eight channels, always the same ones;
  // sixteen threads have one group of 128. The last warp has other work, if the rest suffices.
  constexpr int WORKERS = DOTS == 24 && VECTORS <= THREADS - 32 ? (THREADS - 32) / VECTORS * VECTORS : THREADS;
  static_assert(WORKERS % 32 == 0, "whole warps");
  for (int i = thread; thread < WORKERS && i < (live * VECTORS + 31) / 32 * 32; i += WORKERS) {
    const bool inside = i < live * VECTORS;
    const int n = inside ? i / VECTORS : 0, at = i % VECTORS * 8;
    const i64 t = first + n;
    const float* m = mix + n * SLOTS;
    const float* g = m + GRAM_AT;
    const float rho = rsqrt_((g[0] + g[4] + g[7] + g[9]) / (4 * D) + EPS);
    float pre[4], u[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
    UNROLL for (int j = 0; j < 4; j++) pre[j] = sigmoid(m[j] * rho * site[24] + site[j]) + EPS;
    float squares = 0.0f;
    int place = 0;
    UNROLL for (int j = 0; j < 4; j++) {
      UNROLL for (int k = j; k < 4; k++) squares += (j == k ? 1.0f : 2.0f) * pre[j] * pre[k] * g[place++];
      float stream[8];
      Element<1>::unpack(*(const Vec4*)(kept + ((n * 4 + j) * CH + at) * 2), stream);
      UNROLL for (int c = 0; c < 8; c++) u[c] += pre[j] * stream[c];
    }
    const float rms = rsqrt_(maximum(squares, 0.0f) / D + EPS);
    float v[8], w[8];
    Element<1>::unpack(norm8, w);
    UNROLL for (int c = 0; c < 4; c++) {
      const u32 rounded = pack_bf16x2(u[2 * c], u[2 * c + 1]);
      v[2 * c] = bf16_low(rounded) * rms * w[2 * c];
      v[2 * c + 1] = bf16_high(rounded) * rms * w[2 * c + 1];
    }
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
  // The next site's values, token n at rank n % CLUSTER.
  if (DOTS == 24 && warp == WARPS - 1 && lane < live && lane % CLUSTER == rank) {
    const float* m = mix + lane * SLOTS;
    const float* g = m + GRAM_AT;
    const float rho = rsqrt_((g[0] + g[4] + g[7] + g[9]) / (4 * D) + EPS);
    const i64 t = first + lane;
    float c[16], next[4];
    UNROLL for (int k = 0; k < 4; k++) next[k] = 2.0f * sigmoid(m[4 + k] * rho * site[25] + site[4 + k]);
    Element<0>::store4(post, t * 4, next);
    sinkhorn(m, rho, site[26], site, c);
    UNROLL for (int j = 0; j < 4; j++) Element<0>::store4(comb, t * 16 + 4 * j, c + 4 * j);
  }
}
HOST_ENTRY(boundary_kernel)
