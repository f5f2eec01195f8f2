// SPDX-License-Identifier: MIT
#include "verify/reference/optimizer.hpp"

#include <cmath>

namespace bellows::reference {

void adamw_step(Vector& parameter, View gradient, Vector& m, Vector& v, const AdamW& config,
                std::uint64_t step) {
    require_size("adamw: gradient", gradient.size(), parameter.size());
    require_size("adamw: m", m.size(), parameter.size());
    require_size("adamw: v", v.size(), parameter.size());
    const double correction1 = 1 - std::pow(config.beta1, static_cast<double>(step));
    const double correction2 = 1 - std::pow(config.beta2, static_cast<double>(step));
    for (std::size_t i = 0; i < parameter.size(); ++i) {
        const double g = gradient[i];
        m[i] = config.beta1 * m[i] + (1 - config.beta1) * g;
        v[i] = config.beta2 * v[i] + (1 - config.beta2) * g * g;
        const double direction = m[i] / correction1 / (std::sqrt(v[i] / correction2) + config.eps);
        parameter[i] -= config.lr * (direction + config.weight_decay * parameter[i]);
    }
}

double global_norm(const std::vector<View>& gradients) {
    double squares = 0;
    for (const View gradient : gradients)
        for (const double value : gradient)
            squares += value * value;
    return std::sqrt(squares);
}

double clip_factor(double norm, double max_norm) {
    return max_norm > 0 && norm > max_norm ? max_norm / norm : 1;
}

} // namespace bellows::reference
