// The vector lanes of the updates: one AVX2, AVX-512 or NEON register of floats or of doubles. Included by lane.h where the
// flags allow it, with GOSSAMER_MM of base/lanes.h; the interface is One's.
#pragma once

namespace gossamer::GOSSAMER_ISA {

using Floats = WidestLane::Floats;
using Doubles = WidestLane::Doubles;

HD Floats multiply_add(Floats a, Floats b, Floats c) { return GOSSAMER_MM(fmadd_ps)(a, b, c); }
HD Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return GOSSAMER_MM(fmadd_pd)(a, b, c); }
HD Floats square_root(Floats x) { return GOSSAMER_MM(sqrt_ps)(x); }
HD Doubles square_root(Doubles x) { return GOSSAMER_MM(sqrt_pd)(x); }

template <class Number>
struct Lane;

template <>
struct Lane<float> {
  using N = float;
  using V = Floats;
  static constexpr int width = sizeof(V) / sizeof(N);

  static HD V set(N x) { return GOSSAMER_MM(set1_ps)(x); }
  static HD V load(const float* p) { return GOSSAMER_MM(loadu_ps)(p); }
  static HD V load(const Half* p) { return WidestLane::load_register(p); }
  static HD V load(const Bfloat* p) { return WidestLane::load_register(p); }
  static HD void store(float* p, V x) { GOSSAMER_MM(storeu_ps)(p, x); }
  static HD void store(Half* p, V x) { WidestLane::store(p, x); }
  static HD void store(Bfloat* p, V x) { WidestLane::store(p, x); }
};

template <>
struct Lane<double> {
  using N = double;
  using V = Doubles;
  static constexpr int width = sizeof(V) / sizeof(N);

  static HD V set(N x) { return GOSSAMER_MM(set1_pd)(x); }
  static HD V load(const double* p) { return GOSSAMER_MM(loadu_pd)(p); }
  static HD void store(double* p, V x) { GOSSAMER_MM(storeu_pd)(p, x); }
};

}  // namespace gossamer::GOSSAMER_ISA
