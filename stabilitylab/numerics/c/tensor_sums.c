// How the kernel reads a tensor: as rows of equal distance, each row a run of entries without gaps.
//
//     x ──> [ cols entries | gap ][ cols entries | gap ] …          stride = cols + gap, in entries
//           └── blocks of 16384 ──┘   one thread a block; a block is summed before it joins the others
//
// `load` takes 16 entries as 32-bit words; bfloat16 is the upper half of a float32, so it is shifted up:
//
//     bit   31   30 … 23    22 … 0
//           sign exponent   fraction        word & 0x7fffffff   magnitude; magnitudes order as integers do
//                                           >= 0x7f800000       NaN or inf
//                                           >> 23               exponent, the bin of the histogram
//
// `block` widens to double and leaves out what is not finite. `quick` sums 1024 entries in float32 first and
// hands them to `block` where the largest magnitude says that squares would leave float32 (0x5d000000 = 2**59,
// 0x2a000000 = 2**-43) or that an entry is not finite.
//
// Both ask for what lies AHEAD bytes further on: the processor's own prefetcher stops at the end of a page, so
// that without it one core reads a tensor that lies in memory at about half the speed. It changes no sum, and
// asking beyond the end of a tensor is harmless.
//
// rows that come back
//     tensor_sums   [ n | sum | sum of squares | largest | not finite ]
//     tensor_detail [ n | not finite | mean | s1 s2 s3 s4 | zeros | 4 over | 4 under | 256 exponents ]
//     adam_sums     the columns of PARAM_SUMS in stats.py; squares are scaled by 2**60 on the way, so that they stay normal

#include <stdint.h>
#include <string.h>
#include <math.h>
#define AHEAD 2048
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef double vd __attribute__((vector_size(64)));
typedef float hf __attribute__((vector_size(32)));
static inline vi load(const char *x, int64_t k, int half) {
  vi v;
  if (half) {
    vh h;
    memcpy(&h, x + 2 * k, 32);
    v = __builtin_convertvector(h, vi) << 16;
  } else
    memcpy(&v, x + 4 * k, 64);
  return v;
}
static inline __attribute__((always_inline)) void block(const char *x, int64_t n, double *o,
                                                        int half) {
  vd s0 = {0}, s1 = {0}, q0 = {0}, q1 = {0};
  vi m = {0}, bad = {0};
  int64_t k = 0;
  for (; k < n; k += 16) {
    vi v;
    if (k + 16 <= n)
      v = load(x, k, half);
    else {
      char t[64] = {0};
      memcpy(t, x + (half ? 2 : 4) * k, (half ? 2 : 4) * (n - k));
      v = load(t, 0, half);
    }
    __builtin_prefetch(x + (half ? 2 : 4) * k + AHEAD);
    vi b = v & 0x7fffffff, nf = b >= 0x7f800000, g;
    b &= ~nf;
    v &= ~nf;
    bad -= nf;
    g = b > m;
    m = (b & g) | (m & ~g);
    hf lo, hi;
    memcpy(&lo, &v, 32);
    memcpy(&hi, (char *)&v + 32, 32);
    vd d0 = __builtin_convertvector(lo, vd), d1 = __builtin_convertvector(hi, vd);
    s0 += d0;
    s1 += d1;
    q0 += d0 * d0;
    q1 += d1 * d1;
  }
  for (int j = 0; j < 8; j++) {
    o[0] += s0[j] + s1[j];
    o[1] += q0[j] + q1[j];
  }
  for (int j = 0; j < 16; j++) {
    float a;
    int32_t t = m[j];
    memcpy(&a, &t, 4);
    if (a > o[2])
      o[2] = a;
    o[3] += bad[j];
  }
}
static inline __attribute__((always_inline)) void quick(const char *x, int64_t n, double *o,
                                                        int half) {
  for (int64_t a = 0; a < n; a += 1024) {
    const char *p = x + (half ? 2 : 4) * a;
    if (n - a < 1024) {
      block(p, n - a, o, half);
      break;
    }
    vf s0 = {0}, s1 = {0}, q0 = {0}, q1 = {0};
    vi m0 = {0}, m1 = {0};
    for (int64_t k = 0; k < 1024; k += 32) {
      __builtin_prefetch(p + (half ? 2 : 4) * k + AHEAD);
      if (!half)
        __builtin_prefetch(p + 4 * k + AHEAD + 64);
      vi u = load(p, k, half), v = load(p, k + 16, half), b = u & 0x7fffffff, c = v & 0x7fffffff,
         g = b > m0, h = c > m1;
      m0 = (b & g) | (m0 & ~g);
      m1 = (c & h) | (m1 & ~h);
      vf f = (vf)u, e = (vf)v;
      s0 += f;
      s1 += e;
      q0 += f * f;
      q1 += e * e;
    }
    int32_t top = 0;
    for (int j = 0; j < 16; j++) {
      if (m0[j] > top)
        top = m0[j];
      if (m1[j] > top)
        top = m1[j];
    }
    if (top == 0)
      continue;
    if (top >= 0x5d000000 || top < 0x2a000000) {
      block(p, 1024, o, half);
      continue;
    } /* squares would leave float32, or entries are not finite */
    s0 += s1;
    q0 += q1;
    hf l, h;
    memcpy(&l, &s0, 32);
    memcpy(&h, (char *)&s0 + 32, 32);
    vd d = __builtin_convertvector(l, vd) + __builtin_convertvector(h, vd);
    memcpy(&l, &q0, 32);
    memcpy(&h, (char *)&q0 + 32, 32);
    vd c = __builtin_convertvector(l, vd) + __builtin_convertvector(h, vd);
    for (int j = 0; j < 8; j++) {
      o[0] += d[j];
      o[1] += c[j];
    }
    float t;
    memcpy(&t, &top, 4);
    if (t > o[2])
      o[2] = t;
  }
}
void tensor_sums(const char *x, int half, int64_t rows, int64_t cols, int64_t stride, double *out) {
  double S = 0, Q = 0, M = 0, B = 0;
  int64_t w = half ? 2 : 4, per = cols > 16384 ? (cols + 16383) / 16384 : 1, nb = rows * per;
#pragma omp parallel for reduction(+ : S, Q, B) reduction(max : M)                                 \
    schedule(static) if (rows * cols > 65536)
  for (int64_t i = 0; i < nb; i++) {
    double o[4] = {0};
    int64_t r = i / per, c = (i % per) * 16384;
    int64_t n = per > 1 ? (cols - c < 16384 ? cols - c : 16384) : cols;
    const char *p = x + w * (r * stride + c);
    if (half)
      quick(p, n, o, 1);
    else
      quick(p, n, o, 0);
    S += o[0];
    Q += o[1];
    B += o[3];
    M = o[2] > M ? o[2] : M;
  }
  out[0] += rows * cols;
  out[1] += S;
  out[2] += Q;
  if (M > out[3])
    out[3] = M;
  out[4] += B;
}
static inline __attribute__((always_inline)) void detail(const char *x, int64_t n, double mean,
                                                         const int32_t *lim, double *o, int half) {
  vd a0 = {0}, a1 = {0}, b0 = {0}, b1 = {0}, c0 = {0}, c1 = {0}, e0 = {0}, e1 = {0};
  vi z = {0}, t[8] = {{0}};
  uint32_t h[4][256];
  memset(h, 0, sizeof h);
  for (int64_t k = 0; k < n; k += 16) {
    vi v;
    int m = n - k < 16 ? n - k : 16;
    if (m == 16)
      v = load(x, k, half);
    else {
      char u[64] = {0};
      memcpy(u, x + (half ? 2 : 4) * k, (half ? 2 : 4) * m);
      v = load(u, 0, half);
    }
    vi b = v & 0x7fffffff, ok = b < 0x7f800000;
    if (m < 16)
      for (int j = m; j < 16; j++)
        ok[j] = 0;
    for (int j = 0; j < m; j++)
      h[j & 3][b[j] >> 23]++;
    z -= ok & (b == 0);
    for (int f = 0; f < 4; f++) {
      t[f] -= ok & (b >= lim[f]);
      t[4 + f] -= ok & (b > 0) & (b <= lim[4 + f]);
    }
    v &= ok;
    hf lo, hi;
    memcpy(&lo, &v, 32);
    memcpy(&hi, (char *)&v + 32, 32);
    vi one = ok & 1;
    typedef int32_t hi_t __attribute__((vector_size(32)));
    hi_t l1, h1;
    memcpy(&l1, &one, 32);
    memcpy(&h1, (char *)&one + 32, 32);
    vd d = (__builtin_convertvector(lo, vd) - mean) * __builtin_convertvector(l1, vd),
       g = (__builtin_convertvector(hi, vd) - mean) * __builtin_convertvector(h1, vd), p = d * d,
       q = g * g;
    a0 += d;
    a1 += g;
    b0 += p;
    b1 += q;
    c0 += p * d;
    c1 += q * g;
    e0 += p * p;
    e1 += q * q;
  }
  for (int j = 0; j < 8; j++) {
    o[0] += a0[j] + a1[j];
    o[1] += b0[j] + b1[j];
    o[2] += c0[j] + c1[j];
    o[3] += e0[j] + e1[j];
  }
  for (int j = 0; j < 16; j++) {
    o[4] += z[j];
    for (int f = 0; f < 8; f++)
      o[5 + f] += t[f][j];
  }
  for (int j = 0; j < 256; j++)
    o[13 + j] += (double)h[0][j] + h[1][j] + h[2][j] + h[3][j];
}
void tensor_detail(const char *x, int half, int64_t rows, int64_t cols, int64_t stride,
                   const int32_t *lim, double *out) {
  double s[5] = {0}, T[269] = {0};
  tensor_sums(x, half, rows, cols, stride, s);
  double k = s[0] - s[4], mean = k > 0 ? s[1] / k : 0;
  int64_t w = half ? 2 : 4, per = cols > 65536 ? (cols + 65535) / 65536 : 1,
          grp = per > 1 ? 1 : (cols < 1 ? 1 : (65535 + cols) / cols),
          nb = per > 1 ? rows * per : (rows + grp - 1) / grp;
  if (rows * cols == 0)
    nb = 0;
#pragma omp parallel for reduction(+ : T[ : 269]) schedule(static) if (rows * cols > 65536)
  for (int64_t i = 0; i < nb; i++) {
    double o[269] = {0};
    if (per > 1) {
      int64_t r = i / per, c = (i % per) * 65536;
      int64_t n = cols - c < 65536 ? cols - c : 65536;
      const char *p = x + w * (r * stride + c);
      if (half)
        detail(p, n, mean, lim, o, 1);
      else
        detail(p, n, mean, lim, o, 0);
    } else
      for (int64_t r = i * grp; r < rows && r < (i + 1) * grp; r++) {
        const char *p = x + w * r * stride;
        if (half)
          detail(p, cols, mean, lim, o, 1);
        else
          detail(p, cols, mean, lim, o, 0);
      }
    for (int j = 0; j < 269; j++)
      T[j] += o[j];
  }
  out[0] = s[0];
  out[1] = s[4];
  out[2] = mean;
  for (int j = 0; j < 13; j++)
    out[3 + j] = T[j];
  for (int j = 0; j < 256; j++)
    out[16 + j] = T[13 + j];
}
void adam_sums(const float *restrict G, const float *restrict W, const float *restrict E,
               const float *restrict V, const float *restrict X, int64_t N, const double *a,
               double *out) {
  const float c1 = a[0], c2 = a[1], lr = a[2], eps = a[3], wd = a[4], top = 3.4028234e38f;
  double gq = 0, wq = 0, uq = 0, rq = 0;
  float gm = 0, wm = 0;
  int64_t gb = 0, wb = 0, sb = 0, lo = 0, ls = 0;
  int64_t nb = (N + 4095) / 4096;
#pragma omp parallel for reduction(+ : gq, wq, uq, rq, gb, wb, sb, lo, ls) reduction(max : gm, wm) \
    schedule(static) if (nb > 8)
  for (int64_t i = 0; i < nb; i++) {
    int64_t b = i * 4096, n = N - b < 4096 ? N - b : 4096;
    const float *g = G + b, *w = W + b, *e = E + b, *v = V + b, *x = X + b;
    float q0 = 0, q1 = 0, q2 = 0, q3 = 0, m0 = 0, m1 = 0;
    int b0 = 0, b1 = 0, b2 = 0, b3 = 0, b4 = 0;
#pragma omp simd reduction(+ : q0, q1, q2, q3, b0, b1, b2, b3, b4) reduction(max : m0, m1)
    for (int64_t k = 0; k < n; k++) {
      float ga = fabsf(g[k]), wa = fabsf(w[k]);
      int go = ga <= top, wo = wa <= top, so = (fabsf(e[k]) <= top) & (fabsf(v[k]) <= top);
      ga = go ? ga : 0.f;
      wa = wo ? wa : 0.f;
      b0 += !go;
      b1 += !wo;
      b2 += !so;
      m0 = ga > m0 ? ga : m0;
      m1 = wa > m1 ? wa : m1;
      float h = v[k] * c2, s = sqrtf(x[k] * c2), d = (e[k] * c1) / (s + eps);
      float u = lr * d;
      u = u + wd * (w[k] + u);
      float f = h > eps * eps ? h : eps * eps;
      float r = ga * ga / f;
      b3 += ga < eps;
      b4 += s < eps;
      q0 += ga * ga * 0x1p60f;
      q1 += wa * wa;
      u *= 0x1p30f;
      q2 += (fabsf(u) <= top) ? u * u : 0.f;
      q3 += (r <= top) ? r : 0.f;
    }
    gq += q0;
    wq += q1;
    uq += q2;
    rq += q3;
    gm = m0 > gm ? m0 : gm;
    wm = m1 > wm ? m1 : wm;
    gb += b0;
    wb += b1;
    sb += b2;
    lo += b3;
    ls += b4;
  }
  double o[12] = {N, gq * 0x1p-60, gm, gb, wq, wm, wb, sb, uq * 0x1p-60, rq, lo, ls};
  memcpy(out, o, sizeof o);
}
