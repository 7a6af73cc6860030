// SPDX-License-Identifier: Apache-2.0
/// What export_model() (qlorapp/io/export.hpp) writes, one function a target.
#pragma once

#include <string>

#include "qlorapp/io/export.hpp"

namespace qlorapp {

void export_gguf(const std::string& model, const std::string& adapter, const std::string& file, const ExportOptions& options);
void export_gguf_adapter(const std::string& model, const std::string& adapter, const std::string& file, const std::string& type);
void export_ollama(const std::string& model, const std::string& adapter, const std::string& folder, const ExportOptions& options);
void export_for_server(const std::string& model, const std::string& adapter, const std::string& output,
                       const ExportOptions& options);

}  // namespace qlorapp
