"""Inspection of trained models (Sec. 4.5, App. D.7, App. D.8): numbers, figures, and pages."""

from vitlab.inspection.attention import attention_layers as attention_layers
from vitlab.inspection.attention import attention_maps as attention_maps
from vitlab.inspection.attention import attention_rollout as attention_rollout
from vitlab.inspection.attention import mean_attention_distance as mean_attention_distance
from vitlab.inspection.attention import prediction_grid as prediction_grid
from vitlab.inspection.attention import prediction_weights as prediction_weights
from vitlab.inspection.attention import visit_attention as visit_attention
from vitlab.inspection.embeddings import filter_components as filter_components
from vitlab.inspection.embeddings import filters_of as filters_of
from vitlab.inspection.embeddings import position_similarity as position_similarity
from vitlab.inspection.embeddings import positions_of as positions_of
from vitlab.inspection.embeddings import token_components as token_components
