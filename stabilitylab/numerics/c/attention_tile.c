// What one tile of attention scores adds to the sums of its queries and keys, row by row, in the processor's cache.
//
//     s[z]   key ──>            a row: 1 hidden keys to LOWEST, largest logit   2 e = exp(s - largest) and its sums
//     query  [ lo | seen | hi ]        3 the weights e / total onto the sums of the keys
//       │    outside lo..hi nothing is read: the causal order and the window hide it
//       v
//
// The same text is compiled for float32 and, with -DDOUBLE, for float64.
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef DOUBLE
typedef double real;
typedef int64_t whole;
enum { MANTISSA = 52, BIAS = 1023, TERMS = 12 };
static const real ROUND = 6755399441055744.0, TINY = -700, LOG2_HIGH = 0.693147180369123816490, LOG2_LOW = 1.90821492927058770002e-10;
#else
typedef float real;
typedef int32_t whole;
enum { MANTISSA = 23, BIAS = 127, TERMS = 8 };
static const real ROUND = 12582912, TINY = -87, LOG2_HIGH = 0.693359375, LOG2_LOW = -2.1219444005469057e-4;
#endif
static const real SERIES[] = {1,       1,        1. / 2,    1. / 6,      1. / 24,      1. / 120,
                              1. / 720, 1. / 5040, 1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800};
static const real LOWEST = -1e30; // stands for a hidden key: finite, so that 0*LOWEST is 0
enum { LANES = 64 / sizeof(real) };
typedef real vr __attribute__((vector_size(64)));  // 16 floats or 8 doubles
typedef whole vi __attribute__((vector_size(64))); // as many whole numbers, for bits and comparisons

struct tile {
  real *s, *raw;            // (z, row, key): what the softmax sees, and the logits before a cap and biases
  const uint8_t *seen;      // 1 where a query sees a key, NULL: by order alone
  int64_t seen_batch, seen_head, seen_row; // its strides
  const double *sinks;      // (head,) logit of a slot without a value, or NULL
  int64_t batches, heads, rows, keys;      // size of the tile; z runs over batch and head
  int64_t first_head, query, key;          // its first head, the place of its first query, its first key
  int64_t left, right;      // keys seen to both sides, -1: all
  int64_t careful;          // whether a logit may be NaN or infinite
  double *peak, *total, *spread, *far, *count;   // (z, query) from the first row of the tile on
  double *column, *had, *uniform;                // (z, key) from the first key of the tile on
  double *first, *last;                          // (batch, query) from the first row of the tile on
  double *highest, *nonfinite;                   // (z,)
  int64_t queries, all_keys;                     // strides of what is of a row and of a key
};

static inline __attribute__((always_inline)) vr load(const real *x, int64_t n) {
  vr v = LOWEST - (vr){0};
  memcpy(&v, x, n * sizeof(real));
  return v;
}

static inline vr chosen(vi mask, vr yes, vr no) { return (vr)((mask & (vi)yes) | (~mask & (vi)no)); }

// e^x for x <= 0: 2^n by the bits of the exponent, times the Taylor series of what is left, |r| <= log(2)/2.
// Adding 1.5*2^MANTISSA rounds to a whole number and leaves it in the lowest bits. NaN stays NaN.
static inline __attribute__((always_inline)) vr exponential(vr x) {
  vi tiny = x < TINY;
  vr kept = chosen(tiny, TINY - (vr){0}, x);
  vr t = kept * (real)1.4426950408889634 + ROUND, n = t - ROUND;
  vr r = (kept - n * LOG2_HIGH) - n * LOG2_LOW;
  vr sum = SERIES[TERMS - 1] - (vr){0};
  for (int i = TERMS - 2; i >= 0; i--) sum = sum * r + SERIES[i];
  vi bits = ((vi)t - (vi)(ROUND - (vr){0}) + BIAS) << MANTISSA;
  return (vr)((vi)(sum * (vr)bits) & ~tiny);
}

static real added(vr v) {
  double sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}

struct work { // what one thread adds up before it is added to the sums, (keys + 1) of each
  real *column, *had, *uniform;       // weight received; queries that see the key; what uniform attention gives
  double *had_steps, *uniform_steps;  // the same as differences from key to key, where order alone decides
  double highest, nonfinite;
};

// Hidden keys get LOWEST; the largest raw logit, and how many are not finite.
static double prepare(const struct tile *t, real *s, const real *raw, const uint8_t *seen, int64_t lo, int64_t hi,
                      struct work *w) {
  double keys = hi - lo;
  real top = -INFINITY;
  if (seen) {
    int64_t n = 0;
    for (int64_t j = lo; j < hi; j++) n += seen[j];
    keys = n;
  }
  if (t->careful) {
    for (int64_t j = lo; j < hi; j++) {
      if (seen && !seen[j]) continue;
      if (!isfinite(raw[j])) w->nonfinite += 1;
      if (raw[j] != raw[j] || raw[j] > top) top = raw[j] != raw[j] || top != top ? NAN : raw[j];
    }
    for (int64_t j = lo; j < hi; j++) s[j] = s[j] < LOWEST ? LOWEST : s[j];
  } else if (raw != s && !seen) {
    for (int64_t j = lo; j < hi; j++) top = raw[j] > top ? raw[j] : top;
  } else if (raw != s) {
    for (int64_t j = lo; j < hi; j++) top = seen[j] && raw[j] > top ? raw[j] : top;
  }
  if (seen)
    for (int64_t j = lo; j < hi; j++) s[j] = seen[j] ? s[j] : LOWEST;
  if (keys && (top != top || top > w->highest)) w->highest = w->highest != w->highest ? NAN : top;
  return keys;
}

static double largest(const real *s, int64_t lo, int64_t hi) {
  vr best0 = LOWEST - (vr){0}, best1 = best0;
  int64_t j = lo;
  for (; j + 2 * LANES <= hi; j += 2 * LANES) {
    vr a = load(s + j, LANES), b = load(s + j + LANES, LANES);
    best0 = chosen(a > best0, a, best0);
    best1 = chosen(b > best1, b, best1);
  }
  for (; j < hi; j += LANES) {
    vr a = j + LANES <= hi ? load(s + j, LANES) : load(s + j, hi - j);
    best0 = chosen(a > best0, a, best0);
  }
  best0 = chosen(best1 > best0, best1, best0);
  real best = best0[0];
  for (int i = 1; i < LANES; i++) best = best0[i] > best ? best0[i] : best;
  return best;
}

struct row { vr total, spread, far; }; // sums of e, e*(s - peak) and e*|query - key|

static inline __attribute__((always_inline)) void weigh(real *s, int64_t n, real peak, vr away, struct row *sums) {
  vr x = load(s, n) - peak, e = exponential(x);
  sums->total += e;
  sums->spread += e * x;
  sums->far += e * chosen(away < 0, -away, away);
  memcpy(s, &e, n * sizeof(real));
}

// One row: largest logit, then e = exp(s - largest) in its place with all its sums, then its weights by key.
static void one_row(const struct tile *t, int64_t z, int64_t row, struct work *w) {
  int64_t b = z / t->heads, h = z % t->heads, query = t->query + row, lo = 0, hi = t->keys;
  if (t->right >= 0 && query + t->right + 1 - t->key < hi) hi = query + t->right + 1 - t->key;
  if (t->left >= 0 && query - t->left - t->key > lo) lo = query - t->left - t->key;
  if (hi < lo) hi = lo;
  real *s = t->s + (z * t->rows + row) * t->keys;
  const real *raw = t->raw + (z * t->rows + row) * t->keys;
  const uint8_t *seen = t->seen ? t->seen + b * t->seen_batch + h * t->seen_head + row * t->seen_row : NULL;
  double keys = prepare(t, s, raw, seen, lo, hi, w);
  int64_t at = z * t->queries + row, first = lo, last = hi - 1;
  t->count[at] = keys;
  if (!keys) return;
  if (t->first_head + h == 0) {
    while (seen && !seen[first]) first++;
    while (seen && !seen[last]) last--;
    t->first[b * t->queries + row] = t->key + first;
    t->last[b * t->queries + row] = t->key + last;
  }
  real peak = largest(s, lo, hi);
  if (!t->careful && raw == s && peak > w->highest) w->highest = peak;
  struct row sums = {{0}, {0}, {0}};
  vr away = -(vr){0} + (real)(t->key + lo - query);
  for (int i = 0; i < LANES; i++) away[i] += i;
  int64_t j = lo;
  for (; j + LANES <= hi; j += LANES, away += LANES) weigh(s + j, LANES, peak, away, &sums);
  if (j < hi) weigh(s + j, hi - j, peak, away, &sums);
  double sum = added(sums.total), share = 1 / sum;
  t->peak[at] = peak, t->total[at] = sum, t->spread[at] = added(sums.spread), t->far[at] = added(sums.far);
  if (!isfinite(sum) || peak <= LOWEST / 2) return;
  if (t->sinks) share /= 1 + exp(t->sinks[t->first_head + h] - peak - log(sum));
  for (int64_t j = lo; j < hi; j++) w->column[j] += (real)share * s[j];
  if (seen) {
    real even = 1 / keys;
    for (int64_t j = lo; j < hi; j++) w->had[j] += seen[j];
    for (int64_t j = lo; j < hi; j++) w->uniform[j] += even * seen[j];
  } else {
    w->had_steps[lo] += 1, w->had_steps[hi] -= 1;
    w->uniform_steps[lo] += 1 / keys, w->uniform_steps[hi] -= 1 / keys;
  }
}

// Add what one thread has gathered of a head, in the order of its rows, and clear it.
static void put(const struct tile *t, int64_t z, struct work *w) {
  double had = 0, uniform = 0, *column = t->column + z * t->all_keys;
  for (int64_t j = 0; j < t->keys; j++) {
    had += w->had_steps[j], uniform += w->uniform_steps[j];
    column[j] += w->column[j];
    t->had[z * t->all_keys + j] += had + w->had[j];
    t->uniform[z * t->all_keys + j] += uniform + w->uniform[j];
  }
  double *top = t->highest + z;
  if (w->highest != w->highest || w->highest > *top) *top = *top != *top ? NAN : w->highest;
  t->nonfinite[z] += w->nonfinite;
}

// Pieces of at most 64 rows of one head; those of a round are spread over the threads.
int attention_tile(const struct tile *t) {
  int64_t pieces = (t->rows + 63) / 64, all = t->batches * t->heads * pieces, width = t->keys + 1, round = 1;
#ifdef _OPENMP
  round = omp_get_max_threads() < all ? omp_get_max_threads() : all;
#endif
  size_t size = width * (3 * sizeof(real) + 2 * sizeof(double));
  char *memory = malloc(round * size);
  if (!memory) return 1;
  struct work *works = malloc(round * sizeof(struct work));
  for (int64_t from = 0; from < all; from += round) {
    int64_t to = from + round < all ? from + round : all;
#pragma omp parallel for schedule(static) if (to - from > 1)
    for (int64_t i = from; i < to; i++) {
      struct work *w = works + (i - from);
      char *own = memory + (i - from) * size;
      memset(own, 0, size);
      w->had_steps = (double *)own, w->uniform_steps = w->had_steps + width;
      w->column = (real *)(w->uniform_steps + width), w->had = w->column + width, w->uniform = w->had + width;
      w->highest = -INFINITY, w->nonfinite = 0;
      int64_t z = i / pieces, row = i % pieces * 64;
      for (int64_t r = row; r < row + 64 && r < t->rows; r++) one_row(t, z, r, w);
    }
    for (int64_t i = from; i < to; i++) put(t, i / pieces, works + (i - from));
  }
  free(works);
  free(memory);
  return 0;
}
