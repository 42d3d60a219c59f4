// Matrix fragments of a warp (nvcuda::wmma), for tests: every lane holds a whole fragment and stores its share of it. CUDA does not define
// which lane holds which element. Here a lane that loads other data than the rest of its warp gives a wrong stored result.
#pragma once

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k>
struct Shape {
  static constexpr int rows = std::is_same<Use, matrix_b>::value ? k : m, columns = std::is_same<Use, matrix_a>::value ? k : n;
};

template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
  static constexpr int rows = Shape<Use, m, n, k>::rows, columns = Shape<Use, m, n, k>::columns;
  static constexpr int num_elements = rows * columns;
  static constexpr bool by_column = std::is_same<Layout, col_major>::value;
  T x[num_elements];
};

inline void gather() { emulator::warp_operation(-4, emulator::mask_of(), nullptr, [](void**) {}); }

template <typename Fragment, typename T>
void load(Fragment& fragment, const T* from, unsigned leading, bool by_column) {
  gather();
  for (int row = 0; row < Fragment::rows; ++row)
    for (int column = 0; column < Fragment::columns; ++column)
      fragment.x[row * Fragment::columns + column] = from[by_column ? column * leading + row : row * leading + column];
}
template <typename Use, int m, int n, int k, typename T, typename Layout>
void load_matrix_sync(fragment<Use, m, n, k, T, Layout>& fragment, const T* from, unsigned leading) {
  load(fragment, from, leading, fragment.by_column);
}
template <int m, int n, int k, typename T>
void load_matrix_sync(fragment<accumulator, m, n, k, T>& fragment, const T* from, unsigned leading, layout_t layout) {
  load(fragment, from, leading, layout == mem_col_major);
}

template <int m, int n, int k, typename T>
void store_matrix_sync(T* to, const fragment<accumulator, m, n, k, T>& fragment, unsigned leading, layout_t layout) {
  gather();
  for (size_t i = emulator::lane(); i < size_t(m) * n; i += 32) {
    const size_t row = i / n, column = i % n;
    to[layout == mem_col_major ? column * leading + row : row * leading + column] = fragment.x[i];
  }
  gather();
}

template <typename Fragment, typename T>
void fill_fragment(Fragment& fragment, T value) {
  for (auto& element : fragment.x) element = value;
}

template <int m, int n, int k, typename A, typename B, typename Left, typename Right, typename Sum>
void mma_sync(fragment<accumulator, m, n, k, Sum>& d, const fragment<matrix_a, m, n, k, A, Left>& a,
              const fragment<matrix_b, m, n, k, B, Right>& b, const fragment<accumulator, m, n, k, Sum>& c) {
  gather();
  using Wide = typename std::conditional<std::is_same<Sum, int>::value, int, float>::type;
  for (int row = 0; row < m; ++row)
    for (int column = 0; column < n; ++column) {
      Wide sum = c.x[row * n + column];
      for (int i = 0; i < k; ++i) sum += Wide(a.x[row * k + i]) * Wide(b.x[i * n + column]);
      d.x[row * n + column] = Sum(sum);
    }
}

}  // namespace wmma
}  // namespace nvcuda
