"""Jobs of Alibaba Cloud PAI-DLC."""
