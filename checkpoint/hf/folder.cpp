// SPDX-License-Identifier: MIT
#include "folder_files.hpp"
#include "names.hpp"
#include "stored_rows.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/checkpoint/hf_folder.hpp>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <set>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

namespace {

std::string text_of(const std::vector<std::uint64_t>& shape) {
    std::string text = "[";
    for (const std::uint64_t extent : shape)
        text += (text.size() > 1 ? ", " : "") + std::to_string(extent);
    return text + "]";
}

bool is_floating(StoredType type) {
    return type == StoredType::F32 || type == StoredType::BF16 || type == StoredType::F16;
}

} // namespace

bool HfFolder::is_one(const fs::path& folder) {
    std::error_code none;
    return fs::is_regular_file(folder / kHfConfigFile, none) &&
           !fs::exists(folder / "state.json", none);
}

HfFolder::HfFolder(const fs::path& folder) {
    std::error_code error;
    folder_ = fs::canonical(folder, error);
    if (error)
        throw Error(ErrorCode::Io, errno_message("open", folder, error.value()));
    (void)file_in(folder_, kHfConfigFile);
    config_ = load_hf_config(folder_);
    open_files();
    find_modules();
    check_tensors();
    check_head();
    find_coded_experts();
    for (const auto& [name, tensor] : tensors_)
        bytes_ += tensor.bytes.size();
}

void HfFolder::open_files() {
    std::error_code none;
    const bool single = fs::exists(folder_ / kHfWeightsFile, none);
    const bool sharded = fs::exists(folder_ / kHfIndexFile, none);
    if (single && sharded)
        throw Error(ErrorCode::InvalidArgument, in_quotes(folder_.string()) + " has both " +
                                                    kHfWeightsFile + " and " + kHfIndexFile +
                                                    "; remove the one that does not belong to it");
    if (!single && !sharded)
        refuse_folder_without_tensors(folder_);
    if (single)
        return open_file(kHfWeightsFile);
    index_ = read_hf_index(file_in(folder_, kHfIndexFile));
    std::set<std::string> files;
    for (const auto& [tensor, file] : index_)
        files.insert(file);
    for (const std::string& file : files)
        open_file(file);
    for (const auto& [tensor, file] : index_)
        if (!tensors_.contains(tensor))
            throw Error(ErrorCode::Corrupt, in_quotes((folder_ / kHfIndexFile).string()) +
                                                ": tensor " + in_quotes(tensor) +
                                                " does not stand in " + in_quotes(file));
}

void HfFolder::open_file(const std::string& name) {
    const fs::path path = file_in(folder_, name);
    const SafetensorsReader reader(path);
    if (const auto format = reader.metadata().find("format");
        format != reader.metadata().end() && format->second != "pt" && format->second != "np")
        throw Error(ErrorCode::InvalidArgument, in_quotes(path.string()) + " has the format " +
                                                    in_quotes(format->second) + ", not \"pt\"");
    MappedFile& map = maps_.emplace_back(path);
    if (map.bytes().size() != reader.file_bytes())
        throw Error(ErrorCode::Io, in_quotes(path.string()) + " changes while it is read");
    for (const SafetensorsReader::Tensor& stored : reader.tensors()) {
        if (!index_.empty()) {
            const auto listed = index_.find(stored.name);
            if (listed == index_.end())
                throw Error(ErrorCode::Corrupt, in_quotes(path.string()) + ": tensor " +
                                                    in_quotes(stored.name) + " is not in " +
                                                    kHfIndexFile);
            if (listed->second != name)
                throw Error(ErrorCode::Corrupt,
                            in_quotes(path.string()) + ": tensor " + in_quotes(stored.name) +
                                " stands here, but in " + in_quotes(listed->second) + " by " +
                                kHfIndexFile);
        }
        HfTensor tensor;
        static_cast<StoredTensor&>(tensor) = stored;
        tensor.bytes = map.bytes().subspan(stored.offset, stored.bytes);
        tensor.file = path.string();
        tensors_.emplace(stored.name, std::move(tensor));
    }
}

bool HfFolder::same_tensors(std::string_view one, std::string_view other) const {
    const auto a = tensors_.find(one), b = tensors_.find(other);
    return a != tensors_.end() && b != tensors_.end() && a->second.type == b->second.type &&
           a->second.shape == b->second.shape &&
           std::ranges::equal(a->second.bytes, b->second.bytes);
}

/// MTP modules are layers behind the last (deepseek_v3), each with the model's embedding and head
/// once more. Where they have others, or are not there, the model does without.
void HfFolder::find_modules() {
    const std::uint64_t last = config_.model.layers + config_.mtp_modules;
    for (std::uint64_t layer = config_.model.layers; layer < last; ++layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        if (config_.type != HfModelType::DeepseekV3)
            return;
        for (const char* own : {"enorm", "hnorm", "eh_proj", "shared_head.norm"})
            if (!tensors_.contains(prefix + own + ".weight"))
                return;
        const std::string head =
            config_.model.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight";
        for (const auto& [copy, of_model] :
             {std::pair(prefix + "embed_tokens.weight", std::string("model.embed_tokens.weight")),
              std::pair(prefix + "shared_head.head.weight", head)})
            if (tensors_.contains(copy) && !same_tensors(copy, of_model))
                return;
    }
    config_.model.mtp_depth = config_.mtp_modules;
}

/// Layers behind the last predict further tokens (deepseek_v3); tables of angles follow from the
/// configuration.
bool HfFolder::is_unused(std::string_view name) const {
    constexpr std::string_view kPrefix = "model.layers.", kTable = ".rotary_emb.inv_freq";
    if (name.ends_with(kTable))
        return true;
    if (!name.starts_with(kPrefix) || config_.type != HfModelType::DeepseekV3)
        return false;
    std::uint64_t layer = 0;
    const char* const begin = name.data() + kPrefix.size();
    const auto [end, error] = std::from_chars(begin, name.data() + name.size(), layer);
    const std::uint64_t modules = std::max<std::uint64_t>(config_.mtp_modules, 1);
    return error == std::errc() && end != name.data() + name.size() && *end == '.' &&
           layer >= config_.model.layers && layer - config_.model.layers < modules;
}

/// Every tensor of the model is there, and no other.
void HfFolder::check_tensors() {
    std::set<std::string, std::less<>> expected;
    const auto expect = [&](const HfPart& part, const ParameterInfo& info) {
        if (!expected.insert(part.tensor).second)
            return;
        check_tensor(part.tensor, part.shape, info);
        if (tensors_.find(part.tensor)->second.type == StoredType::F8_E4M3)
            expected.insert(scales_name(part.tensor));
    };
    for (const ParameterInfo& info : parameters(config_.model)) {
        if (info.kind == ParameterKind::Expert) {
            const HfPart fused = fused_part_of(config_.model, info);
            if (tensors_.contains(fused.tensor)) {
                expect(fused, info);
                continue;
            }
        }
        for (const HfPart& part : parts_of(info))
            expect(part, info);
    }
    for (auto at = tensors_.begin(); at != tensors_.end();) {
        const auto& [name, tensor] = *at;
        const bool head = name == "lm_head.weight" && config_.model.tied_embeddings;
        if (expected.contains(name) || head) {
            ++at;
        } else if (is_unused(name)) {
            unused_.push_back(name);
            at = tensors_.erase(at);
        } else {
            throw Error(ErrorCode::InvalidArgument, in_quotes(tensor.file) + ": tensor " +
                                                        in_quotes(name) + " is no part of a " +
                                                        to_string(config_.type) +
                                                        " model of this " + kHfConfigFile);
        }
    }
}

void HfFolder::check_tensor(const std::string& name, const std::vector<std::uint64_t>& shape,
                            const ParameterInfo& info) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end())
        throw Error(ErrorCode::InvalidArgument, in_quotes(folder_.string()) + " lacks the tensor " +
                                                    in_quotes(name) + " " + text_of(shape));
    const HfTensor& tensor = found->second;
    const auto refuse = [&](const HfTensor& bad, const std::string& problem) {
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(bad.file) + ": tensor " + in_quotes(bad.name) + " " + problem);
    };
    if (tensor.shape != shape)
        refuse(tensor, "has the shape " + text_of(tensor.shape) + ", " + kHfConfigFile + " wants " +
                           text_of(shape));
    if (is_floating(tensor.type))
        return;
    if (tensor.type != StoredType::F8_E4M3 || !is_linear(info) || shape.size() != 2)
        refuse(tensor, std::string("has the unsupported dtype ") + to_string(tensor.type));
    if (!config_.fp8)
        refuse(tensor,
               std::string("is F8_E4M3, but ") + kHfConfigFile + " has no quantization_config");
    const auto scales = tensors_.find(scales_name(name));
    if (scales == tensors_.end())
        refuse(tensor, "is F8_E4M3 and lacks its scales " + in_quotes(scales_name(name)));
    const std::vector<std::uint64_t> blocks = {div_up(shape[0], kBlock), div_up(shape[1], kBlock)};
    if (scales->second.shape != blocks)
        refuse(scales->second, "has the shape " + text_of(scales->second.shape) + ", " +
                                   text_of(shape) + " codes want " + text_of(blocks));
    if (scales->second.type != StoredType::F32 && scales->second.type != StoredType::BF16)
        refuse(scales->second,
               std::string("has the unsupported dtype ") + to_string(scales->second.type));
}

/// With tied embeddings the head is the embedding, though it may stand there twice.
void HfFolder::check_head() {
    const auto head = tensors_.find("lm_head.weight");
    if (head == tensors_.end() || !config_.model.tied_embeddings)
        return;
    if (!same_tensors(head->first, "model.embed_tokens.weight"))
        throw Error(ErrorCode::InvalidArgument,
                    in_quotes(head->second.file) +
                        ": lm_head.weight differs from model.embed_tokens.weight, though "
                        "tie_word_embeddings is true");
    unused_.push_back(head->first);
    tensors_.erase(head);
}

StoredType HfFolder::main_type() const {
    std::map<StoredType, std::uint64_t> bytes;
    for (const auto& [name, tensor] : tensors_)
        bytes[tensor.type] += tensor.bytes.size();
    return std::ranges::max_element(bytes, {}, &std::pair<const StoredType, std::uint64_t>::second)
        ->first;
}

} // namespace bellows
