// Which engine trains a parameter. A parameter has at most one owner, an engine that is not closed: with two, both would
// scale and send its gradient. Engines of the whole process are known here, whatever Python has kept of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace gossamer {

class Engine;

// Throws unless the parameter has no owner, or this one. The engine keeps the parameter alive until release().
void claim(const at::Tensor& param, const std::string& name, const std::shared_ptr<Engine>& engine);

// Called once the engine's hooks are gone. Idempotent.
void release(const Engine& engine);

// The owners of these parameters, each once.
std::vector<std::shared_ptr<Engine>> owners_of(const std::vector<at::Tensor>& params);

}  // namespace gossamer
