// SPDX-License-Identifier: MIT
#include "verify/checks/families.hpp"

namespace bellows::checks {

std::string with_storage(const char* name, DType dtype) {
    return std::string(name) + " " + bellows::to_string(dtype);
}

std::vector<OpCheck> op_checks(Depth depth) {
    std::vector<OpCheck> checks;
    for (const auto add :
         {add_codec_checks, add_gemm_checks, add_grouped_gemm_checks, add_layer_checks,
          add_embedding_checks, add_attention_part_checks, add_attention_checks,
          add_paged_attention_checks, add_router_checks, add_router_form_checks,
          add_sampling_checks, add_moe_checks, add_flat_checks, add_optimizer_checks,
          add_fp8_checks, add_few_rows_checks, add_few_rows_attention_checks})
        add(checks, depth);
    return checks;
}

} // namespace bellows::checks
