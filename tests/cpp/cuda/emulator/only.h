// Included before a file of csrc/codec that is compiled for one codec: GOSSAMER_ONLY_CODEC is its part of GOSSAMER_CODECS. The
// calls for the other codecs do nothing, so their tests fail.
#pragma once

#include "codec/codec_list.h"

#undef GOSSAMER_CODECS
#define GOSSAMER_CODECS(CODEC) GOSSAMER_ONLY_CODEC(CODEC)
