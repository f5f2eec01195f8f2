// SPDX-License-Identifier: MIT
#include "app/train/initial_model.hpp"

#include "app/model_folder.hpp"

#include <bellows/base/error.hpp>

#include <filesystem>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

bool computes_alike(const ModelConfig& a, const ModelConfig& b) {
    const auto text = [](ModelConfig model) {
        const ModelConfig usual;
        model.bias_update_rate = usual.bias_update_rate;
        model.balance_loss_alpha = usual.balance_loss_alpha; // the other losses are not written
        model.init_std = usual.init_std;
        model.head_init_std = usual.head_init_std;
        model.max_context = usual.max_context;
        return format_hf_config(model, {});
    };
    return text(a) == text(b);
}

void take_initial_model(const TrainFlags& flags, TrainOptions& options) {
    std::error_code none;
    const bool holds_checkpoint = fs::exists(*flags.init / "state.json", none) ||
                                  fs::exists(*flags.init / "checkpoints", none);
    if (!HfFolder::is_one(*flags.init))
        throw Error(
            ErrorCode::InvalidArgument,
            "--init " + in_quotes(flags.init->string()) + " is no Hugging Face folder: it " +
                (holds_checkpoint ? "holds a checkpoint of a run; go on from it with --resume"
                                  : "has no config.json"));
    const HfFolder folder(*flags.init);
    options.init = folder.folder();
    options.config_name = folder.folder().filename().string();
    if (flags.config)
        options.config = load_run_config(*flags.config);
    ModelConfig& model = options.config.model;
    if (flags.config && !computes_alike(model, folder.config().model))
        throw Error(ErrorCode::InvalidArgument,
                    "--config " + in_quotes(*flags.config) + " has a model of another shape than " +
                        "--init " + in_quotes(folder.folder().string()) +
                        "; leave --config out, or its [model] as that of the folder");
    if (!flags.config)
        model = folder.config().model;
    if (!flags.tokenizer && options.config.train.tokenizer == TrainConfig().tokenizer)
        options.config.train.tokenizer = folder_tokenizer(folder);
}

} // namespace bellows
