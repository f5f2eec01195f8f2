// SPDX-License-Identifier: MIT
#include "new_folder.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <cerrno>
#include <string>
#include <utility>

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

namespace bellows {

namespace fs = std::filesystem;

NewFolder::NewFolder(fs::path target) : target_(fs::absolute(target).lexically_normal()) {
    if (!target_.has_filename()) // "out/"
        target_ = target_.parent_path();
    std::error_code error;
    const fs::file_status status = fs::symlink_status(target_, error);
    if (fs::exists(status) && !(fs::is_directory(status) && fs::is_empty(target_, error)))
        throw Error(ErrorCode::InvalidArgument, "--out " + in_quotes(target_.string()) +
                                                    " is there already; name a new folder or an "
                                                    "empty one");
    fs::create_directories(target_.parent_path(), error);
    if (error)
        throw Error(ErrorCode::Io, errno_message("create", target_.parent_path(), error.value()));
    std::string name =
        (target_.parent_path() / ("." + target_.filename().string() + ".XXXXXX")).string();
    if (::mkdtemp(name.data()) == nullptr)
        throw Error(ErrorCode::Io, errno_message("create", name, errno));
    path_ = name;
    if (::chmod(path_.c_str(), 0755) != 0)
        throw Error(ErrorCode::Io, errno_message("change", path_, errno));
}

NewFolder::~NewFolder() {
    std::error_code ignored;
    if (!committed_)
        fs::remove_all(path_, ignored);
}

void NewFolder::commit() {
    sync_directory(path_);
    // Replaces an empty folder, and nothing else.
    if (::rename(path_.c_str(), target_.c_str()) != 0)
        throw Error(ErrorCode::Io, errno_message("rename", path_, errno));
    committed_ = true;
    sync_directory(target_.parent_path());
}

} // namespace bellows
