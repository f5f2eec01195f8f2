// SPDX-License-Identifier: MIT
#include "verify/reference/gemm.hpp"

#include <cmath>
#include <stdexcept>
#include <string>

namespace bellows::reference {

void require_size(const char* what, std::size_t size, std::size_t expected) {
    if (size != expected)
        throw std::invalid_argument(std::string(what) + " has " + std::to_string(size) +
                                    " elements instead of " + std::to_string(expected));
}

Vector transpose(View a, std::size_t rows, std::size_t columns) {
    require_size("transpose: a", a.size(), rows * columns);
    Vector out(a.size());
    for (std::size_t r = 0; r < rows; ++r)
        for (std::size_t c = 0; c < columns; ++c)
            out[c * rows + r] = a[r * columns + c];
    return out;
}

Vector gemm_nn(View a, View b, std::size_t m, std::size_t n, std::size_t k) {
    require_size("gemm: a", a.size(), m * k);
    require_size("gemm: b", b.size(), k * n);
    Vector c(m * n, 0.0);
    for (std::size_t i = 0; i < m; ++i) {
        double* row = c.data() + i * n;
        for (std::size_t p = 0; p < k; ++p) { // the inner loop runs along contiguous memory
            const double scale = a[i * k + p];
            const double* other = b.data() + p * n;
            for (std::size_t j = 0; j < n; ++j)
                row[j] += scale * other[j];
        }
    }
    return c;
}

Vector gemm_nt(View a, View b, std::size_t m, std::size_t n, std::size_t k) {
    return gemm_nn(a, transpose(b, n, k), m, n, k);
}

Vector gemm_tn(View a, View b, std::size_t m, std::size_t n, std::size_t k) {
    return gemm_nn(transpose(a, k, m), b, m, n, k);
}

Vector absolute(View a) {
    Vector out(a.begin(), a.end());
    for (double& value : out)
        value = std::abs(value);
    return out;
}

void accumulate(Vector& a, View b) {
    require_size("accumulate: b", b.size(), a.size());
    for (std::size_t i = 0; i < a.size(); ++i)
        a[i] += b[i];
}

} // namespace bellows::reference
