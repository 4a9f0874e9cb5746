"""What replicas of one machine share: cores and ports, claims on them, and the real-time class of what keeps time.

Enter: a folder for claims, counts, addresses. Leave: claims that end with the process that holds them.
"""
