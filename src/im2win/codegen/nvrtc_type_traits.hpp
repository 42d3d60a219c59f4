// The traits that CUDA of TVM names, in place of <cuda/std/type_traits>, for NVRTC alone: reading that header and all that it includes takes
// longer than compiling most kernels.
#pragma once

namespace cuda {
namespace std {

template <class T, T x>
struct integral_constant {
  static constexpr T value = x;
};
using true_type = integral_constant<bool, true>;
using false_type = integral_constant<bool, false>;

template <class T, class U>
struct is_same : false_type {};
template <class T>
struct is_same<T, T> : true_type {};
template <class T, class U>
inline constexpr bool is_same_v = is_same<T, U>::value;

template <bool holds, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool holds, class T, class U>
struct conditional {
  using type = T;
};
template <class T, class U>
struct conditional<false, T, U> {
  using type = U;
};

template <class T>
struct remove_cv {
  using type = T;
};
template <class T>
struct remove_cv<const T> : remove_cv<T> {};
template <class T>
struct remove_cv<volatile T> : remove_cv<T> {};
template <class T>
struct remove_cv<const volatile T> : remove_cv<T> {};

// Whether T is one of several types.
template <class T, class... Types>
struct is_one_of : integral_constant<bool, (is_same<T, Types>::value || ...)> {};

template <class T>
struct is_integral : is_one_of<typename remove_cv<T>::type, bool, char, signed char, unsigned char, wchar_t, char16_t, char32_t, short,
                               unsigned short, int, unsigned int, long, unsigned long, long long, unsigned long long> {};
template <class T>
struct is_floating_point : is_one_of<typename remove_cv<T>::type, float, double, long double> {};

template <class T, bool = is_integral<T>::value || is_floating_point<T>::value>
struct is_signed : false_type {};
template <class T>
struct is_signed<T, true> : integral_constant<bool, (T(-1) < T(0))> {};
template <class T, bool = is_integral<T>::value || is_floating_point<T>::value>
struct is_unsigned : false_type {};
template <class T>
struct is_unsigned<T, true> : integral_constant<bool, (T(0) < T(-1))> {};

}  // namespace std
}  // namespace cuda
